"""The kinds of processor for which native code runs here: all that this one is of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlinker.engines.native import targets
from kvlinker.engines.native.targets import TARGETS, Target

HERE = [target for target in TARGETS if target.is_here]


def in_software(target: Target, header: str, name: str) -> Target:
    """What runs on processors with instructions that this one, of kind ``target``, lacks: those are
    functions of a header."""
    options = f"{target.options} -include {Path(__file__).with_name(header)}"
    return replace(target, name=f"{name} in software", options=options)


if HERE and HERE[0].name.startswith("avx512") and not HERE[0].multiplies_bf16:
    HERE.append(in_software(HERE[0], "software_bf16.h", "avx512-bf16"))
EACH = [
    pytest.param(target, id=target.name, marks=[pytest.mark.matrix] if index else [])
    for index, target in enumerate(HERE)
]
"""What tests are to be run for; all but the first take a while longer."""

VNNI_OF_AVX2 = [
    pytest.param(in_software(target, "software_vnni.h", "avx2-vnni"), marks=pytest.mark.matrix)
    for target in HERE
    if target.name == "avx2"
]
"""What runs on processors with AVX-VNNI but not AVX-512."""


@contextmanager
def passing_for(target: Target | None) -> Iterator[None]:
    """Have native code compiled for this kind of processor, or none, for a while."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(targets, "this_target", lambda: target)
        yield
