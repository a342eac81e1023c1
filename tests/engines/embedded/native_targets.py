"""The kinds of processor for which native code runs here: all that this one is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlinker.engines.embedded.native import targets
from kvlinker.engines.embedded.native.targets import TARGETS, Target

HERE = [target for target in TARGETS if target.is_here]
if HERE and HERE[0].name.startswith("avx512") and not HERE[0].multiplies_bf16:
    # What runs on processors with AVX512-BF16, for one that has but the rest of AVX-512.
    header = Path(__file__).with_name("software_bf16.h")
    options = f"{HERE[0].options} -include {header}"
    HERE.append(replace(HERE[0], name="avx512-bf16 in software", options=options))
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
