"""The kinds of processor for which native code runs here: all that this one is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvlinker.engines.embedded.native import targets
from kvlinker.engines.embedded.native.targets import TARGETS, Target

HERE = [target for target in TARGETS if target.is_here]
NAMES = [target.name for target in HERE]


@contextmanager
def passing_for(target: Target | None) -> Iterator[None]:
    """Have native code compiled for this kind of processor, or none, for a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(targets, "this_target", lambda: target)
        yield
