"""Python's collector of cyclic garbage, while many objects are made that all stay: it would look at
them again and again, which takes as long as making them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect nothing in the block."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Collect nothing in the block, which imports modules in a process of the command, and let
    later collections leave out what is there then."""
    with collector_paused():
        yield
    gc.freeze()
