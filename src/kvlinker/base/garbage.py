"""Pauses Python's collector of cyclic garbage while many lasting objects are made. The collector
would inspect them again and again, which takes as long as making them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def pause_collector() -> Iterator[None]:
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
    """Collect nothing while the block imports modules of a command; later collections skip the
    objects that exist at its end."""
    with pause_collector():
        yield
        gc.freeze()  # before it is on again, or it would collect all of them at once
