"""The kinds of processor for which native code runs here: all that this one is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlinker.engines.embedded.native import targets
from kvlinker.engines.embedded.native.targets import TARGETS, Target

_AVX512 = next(target for target in TARGETS if target.name == "avx512")

SOFTWARE_BF16 = replace(
    _AVX512,
    name="avx512-bf16 in software",
    options=f"{_AVX512.options} -include {Path(__file__).with_name('software_bf16.h')}",
)
"""What runs on processors with AVX512-BF16, for those that have but the rest of AVX-512."""

HERE = [target for target in TARGETS if target.is_here]
if HERE and HERE[0] == _AVX512:
    HERE.append(SOFTWARE_BF16)
EACH = [
    pytest.param(target, id=target.name, marks=[pytest.mark.slow] if index else [])
    for index, target in enumerate(HERE)
]
"""What tests are to be run for; all but the first take a while longer."""


@contextmanager
def passing_for(target: Target | None) -> Iterator[None]:
    """Have native code compiled for this kind of processor, or none, for a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(targets, "this_target", lambda: target)
        yield
