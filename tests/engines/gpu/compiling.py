"""Compiles the kernels for GPUs that this machine need not have, and reads what each takes there.

``python -m tests.engines.gpu.compiling`` prints it as JSON. It is a process of its own since the
other tests have Triton interpret kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from kvlinker.engines.embedded.attention.triton_attention import FEW_KEYS, MANY_KEYS
from kvlinker.engines.gpu.attending import attend_tile, merge_partials
from kvlinker.engines.gpu.launching import FP8, FP8_FORMS, PLACED_TOKENS
from kvlinker.engines.gpu.placing import place_tokens

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}

LLAMA = {
    "WIDTH": 128,
    "KEY_DIM": 128,
    "VALUE_DIM": 128,
    "INTERLEAVED": False,
    "ALIGNED": True,
    "PAIRS_BLOCK": 64,
    "REST_BLOCK": 16,
    "VALUE_BLOCK": 128,
}
"""The dimensions of most models' heads."""

DEEPSEEK = LLAMA | {
    "WIDTH": 64,
    "KEY_DIM": 576,
    "VALUE_DIM": 512,
    "INTERLEAVED": True,
    "PAIRS_BLOCK": 32,
    "REST_BLOCK": 512,
    "VALUE_BLOCK": 512,
}
"""The dimensions of latents."""

PLAIN = {"LATENT": False, "SOFTCAP": False, "SINKS": False}
DECODING = {"BLOCK_ROWS": 4, "BLOCK_HEADS": 4} | MANY_KEYS
PREFILL = {"BLOCK_ROWS": 16, "BLOCK_HEADS": 4} | MANY_KEYS
ROW = "*i64"
ATTEND = ["*bf16", "*bf16", *["*fp32"] * 5, *[ROW] * 5, "*u8", *["i32"] * 4, "fp32", "fp32"]
PLACE = [*[ROW] * 3, "*fp32", "*fp32", *["i32"] * 6]
E4M3 = FP8_FORMS[torch.float8_e4m3fn]
PLACED = {"DTYPE": triton.language.bfloat16, "BLOCK_TOKENS": PLACED_TOKENS}


def rounding(form: FP8) -> dict[str, Any]:
    """Return the constants of a cache in this form."""
    return {name.upper(): value for name, value in form._asdict().items()}


KERNELS: dict[str, tuple[Any, list[str], dict[str, Any]]] = {
    "attend, decoding": (attend_tile, ATTEND, LLAMA | PLAIN | DECODING),
    "attend, prefill": (attend_tile, ATTEND, LLAMA | PLAIN | PREFILL),
    "attend, soft cap and sinks": (
        attend_tile,
        ATTEND,
        LLAMA | PREFILL | {"LATENT": False, "SOFTCAP": True, "SINKS": True},
    ),
    "attend, latents": (
        attend_tile,
        ATTEND,
        DEEPSEEK | PLAIN | {"LATENT": True, "BLOCK_ROWS": 1, "BLOCK_HEADS": 16} | FEW_KEYS,
    ),
    "merge": (
        merge_partials,
        ["*bf16", *["*fp32"] * 3, *[ROW] * 3, "i32"],
        {"VALUE_DIM": 128, "SKIPPED": 0, "SINKS": True, "VALUE_BLOCK": 128},
    ),
    "place": (place_tokens, PLACE, PLACED | rounding(FP8(0, 0, 0.0)) | LLAMA),
    "place in fp8": (
        place_tokens,
        PLACE,
        PLACED | rounding(E4M3) | LLAMA,
    ),
}
"""Each kernel, the types of its arguments, and its constants with the compiler's options."""


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one GPU."""

    kernel: str
    target: str
    registers: int
    """Of a thread."""

    spilled: int
    """Bytes (NVIDIA) or vector registers (AMD) that do not fit."""

    shared_bytes: int
    """Of a program."""


def compiled(name: str, target: str) -> Resources:
    """Compile a kernel, down to machine code."""
    kernel, types, settings = KERNELS[name]
    options = {name: settings[name] for name in ("num_warps", "num_stages") if name in settings}
    constants = {name: value for name, value in settings.items() if name not in options}
    names = kernel.arg_names
    signature = dict(zip(names, [*types, *["constexpr"] * len(constants)], strict=True))
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, kind in enumerate(types)
        if kind.startswith("*") or names[index] in ("query_head_stride", "query_row_stride")
    }
    positions = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(kernel, signature, positions, aligned)
    made = triton.compile(source, target=TARGETS[target], options=options)
    if "amdgcn" in made.asm:
        registers, spilled = _amd(made.asm["amdgcn"])
    else:
        registers, spilled = _nvidia(made.asm["ptx"], TARGETS[target].arch)
    return Resources(name, target, registers, spilled, made.metadata.shared)


def _nvidia(ptx: str, arch: int) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        suffix = "a" if arch >= 90 else ""
        command = [get_ptxas(arch).path, "-v", f"--gpu-name=sm_{arch}{suffix}", str(source)]
        command += ["-o", str(Path(folder, "kernel.cubin"))]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", told)
    stores = re.findall(r"(\d+) bytes spill stores", told)
    return int(registers), int(stores[0])


def _amd(assembly: str) -> tuple[int, int]:
    def told(name: str) -> int:
        (value,) = re.findall(rf"\.{name}:\s+(\d+)", assembly)
        return int(value)

    return told("vgpr_count"), told("vgpr_spill_count")


def everything() -> Iterator[Resources]:
    for name in KERNELS:
        for target in TARGETS:
            yield compiled(name, target)


if __name__ == "__main__":
    print(json.dumps([asdict(each) for each in everything()]))
