"""The kinds of processor that native code is compiled for, each with the compiler's options that
choose its instructions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """Describes a kind of processor."""

    name: str
    needs: tuple[str, ...]
    """The capabilities that ``torch.cpu.get_capabilities`` must report of the processor."""

    options: str
    """The compiler's."""

    multiplies_bf16: bool = False

    @property
    def machine(self) -> str:
        """The architecture, as ``platform.machine`` calls it on Linux."""
        return "aarch64" if "neon" in self.needs else "x86_64"

    @property
    def is_here(self) -> bool:
        """True if this processor is of the kind."""
        capabilities = torch.cpu.get_capabilities()
        return all(capabilities.get(need, False) for need in self.needs)


_AVX512 = ("avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "fma3")
_AVX512_OPTIONS = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma"
_VNNI, _VNNI_OPTIONS = (*_AVX512, "avx512_vnni"), f"{_AVX512_OPTIONS} -mavx512vnni"

_AVX2, _AVX2_OPTIONS = ("avx2", "fma3", "f16c"), "-mavx2 -mfma -mf16c"

TARGETS = (
    Target("avx512-bf16", (*_VNNI, "avx512_bf16"), f"{_VNNI_OPTIONS} -mavx512bf16", True),
    Target("avx512-vnni", _VNNI, _VNNI_OPTIONS),
    Target("avx512", _AVX512, _AVX512_OPTIONS),
    Target("avx2-vnni", (*_AVX2, "avx_vnni"), f"{_AVX2_OPTIONS} -mavxvnni"),
    Target("avx2", _AVX2, _AVX2_OPTIONS),
    Target("neon-bf16", ("neon", "bf16", "dot"), "-march=armv8.2-a+bf16+dotprod", True),
    Target("neon-dot", ("neon", "dot"), "-march=armv8.2-a+dotprod"),
    Target("neon", ("neon",), "-march=armv8-a"),
)
"""All kinds; a processor of several kinds is treated as the first one."""


@cache
def this_target() -> Target | None:
    """Return the kind of this processor; None if there is no native code for it."""
    return next((target for target in TARGETS if target.is_here), None)
