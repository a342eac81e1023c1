"""Weights of GGUF files as the codes that they are, in the blocks of native code: the comment at
the top of ``native/grouped_products.cpp`` describes them.

Neighbouring inputs of an output are a group, which share a scale and, in some forms, what is added
to them: a weight is ``scale · (code - OFFSET)``, or ``scale · code + minimum``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray
from torch import Tensor, nn

GROUPED_FILE = "weights.grouped"
"""The file with these weights, in the folder that a GGUF file was unpacked into: a file of
safetensors, by a name that says that it is not all of the model."""

BLOCK = 64
"""The outputs that lie together; the last block is filled up with zeros."""

GroupedForm = Literal[
    "grouped4", "grouped4_min", "grouped5", "grouped5_min", "grouped6", "grouped8"
]
"""Names the form of a weight: the bits of its codes, and whether its groups have minima."""

BITS: Mapping[GroupedForm, int] = {
    "grouped4": 4,
    "grouped4_min": 4,
    "grouped5": 5,
    "grouped5_min": 5,
    "grouped6": 6,
    "grouped8": 8,
}

Numbers = NDArray[np.float32]
Bytes = NDArray[np.integer[Any]]  # uint8


class Codes(NamedTuple):
    """The codes of some rows of a weight."""

    codes: Bytes
    """[rows, inputs]"""

    scales: Numbers
    """[rows, groups]"""

    minima: Numbers | None
    """[rows, groups]; None where a weight is ``scale · (code - OFFSET)``."""


class Kind(NamedTuple):
    """Says how weights of one of ggml's kinds are grouped."""

    form: GroupedForm
    group: int
    """The inputs of a group."""

    codes: Callable[[Bytes], Codes]
    """Takes ggml's blocks [count, bytes], and returns the codes of each as a row."""


def offset_of(form: GroupedForm) -> int:
    """Return the code that means 0 in a form without minima."""
    return 1 << BITS[form] - 1


def codes_of(raw: Bytes, kind: GGMLQuantizationType) -> Codes:
    """Return the codes of rows as they lie in a GGUF file: ``raw`` [rows, bytes]."""
    size = GGML_QUANT_SIZES[kind][1]
    codes, scales, minima = KINDS[kind].codes(raw.reshape(-1, size))
    rows = len(raw), -1
    lowest = None if minima is None else minima.reshape(rows)
    return Codes(codes.reshape(rows), scales.reshape(rows), lowest)


def grouped_blocks(rows: Codes, form: GroupedForm) -> Tensor | None:
    """Return ``rows`` in blocks: [blocks, groups, bytes of a group], uint8; None if a scale or a
    minimum does not fit into fp16."""
    numbers = rows.scales if rows.minima is None else np.stack([rows.scales, rows.minima])
    headers = (
        torch.from_numpy(numbers).half().view(-1, *rows.scales.shape)
    )  # [numbers, rows, groups]
    if not headers.isfinite().all():
        return None
    codes = torch.from_numpy(rows.codes)
    spare = -len(codes) % BLOCK
    headers = nn.functional.pad(headers, (0, 0, 0, spare))
    codes = nn.functional.pad(codes, (0, 0, 0, spare))
    groups = headers.shape[-1]
    headed = headers.view(len(headers), -1, BLOCK, groups).permute(1, 3, 0, 2).contiguous()
    words = _words(codes, BITS[form])
    laid = words.view(len(words), groups, -1)
    return torch.cat([headed.view(*headed.shape[:2], -1).view(torch.uint8), laid], dim=2)


def values_of(blocks: Tensor, form: GroupedForm, outputs: int) -> Tensor:
    """Return the weight [outputs, inputs], fp32, that lies in ``blocks``."""
    count, groups, _ = blocks.shape
    numbers = 2 if form.endswith("_min") else 1
    header_bytes = numbers * BLOCK * torch.float16.itemsize
    headers = blocks[:, :, :header_bytes].contiguous().view(torch.float16)
    headers = headers.view(count, groups, numbers, BLOCK).permute(2, 0, 3, 1).flatten(1, 2).float()
    codes = _codes(blocks[:, :, header_bytes:], BITS[form])
    grouped = codes.view(len(codes), groups, -1).float()
    if numbers == 2:
        values = headers[0, ..., None] * grouped + headers[1, ..., None]
    else:
        values = headers[0, ..., None] * (grouped - offset_of(form))
    return values.flatten(1)[:outputs]


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [64 · blocks, inputs] as the bytes of words: [blocks, bytes]."""
    step = inputs_of_step(bits)
    steps = codes.view(-1, BLOCK, codes.shape[1] // step, step).transpose(1, 2)
    if bits == 8:
        return steps.flatten(1)
    pairs = steps.reshape(*steps.shape[:3], -1, 2, 4) & 15
    words = pairs[..., 0, :] | pairs[..., 1, :] << 4  # [blocks, steps, BLOCK, words, 4]
    high = steps.reshape(*steps.shape[:3], -1, 4) >> 4
    if bits > 4:
        upper = torch.zeros_like(high[..., 0, :])
        for part in range(high.shape[3]):
            upper |= high[..., part, :] << (bits - 4) * part
        words = torch.cat([words, upper[..., None, :]], dim=3)
    return words.transpose(2, 3).flatten(1)


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return what ``_words`` made bytes of: ``words`` [blocks, groups, bytes] become [64 · blocks,
    inputs]."""
    step = inputs_of_step(bits)
    low_count = 1 if bits == 8 else step // 8
    count = low_count + (4 < bits < 8)
    steps = words.reshape(len(words), -1, count, BLOCK, 4).transpose(2, 3)
    low = steps[..., :low_count, :]
    codes = low if bits == 8 else torch.stack([low & 15, low >> 4], dim=4).flatten(3, 4)
    if 4 < bits < 8:
        upper = [steps[..., -1, :] >> (bits - 4) * part for part in range(codes.shape[3])]
        codes = codes | (torch.stack(upper, dim=3) & (1 << bits - 4) - 1) << 4
    return codes.flatten(3).transpose(1, 2).flatten(2).flatten(0, 1)


def inputs_of_step(bits: int) -> int:
    """Return how many inputs native code multiplies by words in one step."""
    return {4: 8, 5: 32, 6: 16, 8: 4}[bits]


class Placed(NamedTuple):
    """Says where a weight lies in the file of grouped weights."""

    form: GroupedForm
    group: int
    shape: tuple[int, int]
    """The weight's shape: [outputs, inputs]."""

    begin: int
    end: int


def joined(one: Placed, other: Placed) -> bool:
    """Return whether one matrix can multiply by both: ``other`` lies behind ``one``, whose last
    block is full, in the same form."""
    same = (one.form, one.group, one.shape[1]) == (other.form, other.group, other.shape[1])
    return same and one.end == other.begin and one.shape[0] % BLOCK == 0


class GroupedFile(NamedTuple):
    """The weights of a folder that lie in blocks, mapped from their file."""

    content: Tensor
    """All of the file, uint8."""

    places: Mapping[str, Placed]
    """By transformers' names."""


def read_grouped(folder: Path) -> GroupedFile | None:
    """Map the grouped weights in ``folder``; None if it has none."""
    path = folder / GROUPED_FILE
    if not path.is_file():
        return None
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    described = header.pop("__metadata__")
    places = {}
    for name, entry in header.items():
        form, group, outputs, inputs = described[name].split()
        begin, end = (8 + length + at for at in entry["data_offsets"])
        shape = int(outputs), int(inputs)
        places[name] = Placed(cast("GroupedForm", form), int(group), shape, begin, end)
    content = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
    return GroupedFile(content, places)


def block_bytes(kind: GGMLQuantizationType, inputs: int) -> int:
    """Return the bytes of a block of outputs with ``inputs`` inputs each."""
    form, group, _ = KINDS[kind]
    numbers = 2 if form.endswith("_min") else 1
    return inputs // group * BLOCK * numbers * 2 + BLOCK * inputs * BITS[form] // 8


def _f16(raw: Bytes, at: int) -> Numbers:
    """Return the number at a byte of each of ggml's blocks: [count, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(raw: Bytes, run: int) -> Bytes:
    """Return the halves of bytes: of each ``run`` of bytes all lower ones, then all upper ones."""
    runs = raw.reshape(len(raw), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(raw), -1)


def _quarters(raw: Bytes) -> Bytes:
    """Return pairs of bits of bytes: of each 32 bytes all lowest ones, then the next, and so on."""
    runs = raw.reshape(len(raw), -1, 1, 32)
    return (runs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3).reshape(len(raw), -1)


def _bits(raw: Bytes) -> Bytes:
    """Return the bits of 32 bytes: all lowest ones, then the next, and so on."""
    return (raw[:, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(len(raw), -1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """Return the bits of bytes, the lowest of each first."""
    return (raw[:, :, None] >> np.arange(8, dtype=np.uint8) & 1).reshape(len(raw), -1)


def _q4_0(raw: Bytes) -> Codes:
    return Codes(_nibbles(raw[:, 2:], 16), _f16(raw, 0), None)


def _q4_1(raw: Bytes) -> Codes:
    return Codes(_nibbles(raw[:, 4:], 16), _f16(raw, 0), _f16(raw, 2))


def _q5_0(raw: Bytes) -> Codes:
    codes = _nibbles(raw[:, 6:], 16) | _fifth_bits(raw[:, 2:6]) << 4
    return Codes(codes, _f16(raw, 0), None)


def _q5_1(raw: Bytes) -> Codes:
    codes = _nibbles(raw[:, 8:], 16) | _fifth_bits(raw[:, 4:8]) << 4
    return Codes(codes, _f16(raw, 0), _f16(raw, 2))


def _q8_0(raw: Bytes) -> Codes:
    return Codes(raw[:, 2:] ^ 128, _f16(raw, 0), None)


def _of_superblock(raw: Bytes, codes: Bytes) -> Codes:
    """Return codes of 256 with scales and minima of 6 bits, in 12 bytes behind the numbers of
    all."""
    packed = raw[:, 4:16].reshape(-1, 3, 4)
    scales = np.concatenate([packed[:, 0] & 63, packed[:, 2] & 15 | packed[:, 0] >> 6 << 4], axis=1)
    minima = np.concatenate([packed[:, 1] & 63, packed[:, 2] >> 4 | packed[:, 1] >> 6 << 4], axis=1)
    return Codes(codes, _f16(raw, 0) * scales, -_f16(raw, 2) * minima)


def _q4_k(raw: Bytes) -> Codes:
    return _of_superblock(raw, _nibbles(raw[:, 16:], 32))


def _q5_k(raw: Bytes) -> Codes:
    return _of_superblock(raw, _nibbles(raw[:, 48:], 32) | _bits(raw[:, 16:48]) << 4)


def _q6_k(raw: Bytes) -> Codes:
    codes = _nibbles(raw[:, :128], 64) | _quarters(raw[:, 128:192]) << 4
    scales = raw[:, 192:208].view(np.int8)
    return Codes(codes, _f16(raw, 208) * scales, None)


def _q3_k(raw: Bytes) -> Codes:
    codes = _quarters(raw[:, 32:96]) | _bits(raw[:, :32]) << 2
    packed = raw[:, 96:108]
    high = packed[:, None, 8:] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scales = (_nibbles(packed[:, :8], 8) | high.reshape(len(raw), -1) << 4).astype(np.int8) - 32
    return Codes(codes + 4, _f16(raw, 108) * scales, None)  # in the middle of four bits


def _q2_k(raw: Bytes) -> Codes:
    minima = raw[:, :16] >> 4
    return Codes(
        _quarters(raw[:, 16:80]), _f16(raw, 80) * (raw[:, :16] & 15), -_f16(raw, 82) * minima
    )


UNEVEN = np.array(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113), np.int8
)
"""The values of the codes of ggml's IQ4 kinds."""

MICROSCALED = np.array((0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), np.int8)
"""The values of the codes of MXFP4, in halves."""


def _bytes_of(meanings: NDArray[np.int8], nibbles: Bytes) -> Bytes:
    """Return what codes of four bits mean, as codes of eight."""
    return cast("Bytes", meanings.view(np.uint8)[nibbles] ^ 128)


def _iq4_nl(raw: Bytes) -> Codes:
    return Codes(_bytes_of(UNEVEN, _nibbles(raw[:, 2:], 16)), _f16(raw, 0), None)


def _iq4_xs(raw: Bytes) -> Codes:
    high = raw[:, 2:4].copy().view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([raw[:, 4:8] & 15, raw[:, 4:8] >> 4], axis=2).reshape(len(raw), -1)
    scales = (low | high.astype(np.uint8) << 4).astype(np.int8) - 32
    return Codes(_bytes_of(UNEVEN, _nibbles(raw[:, 8:], 16)), _f16(raw, 0) * scales, None)


def _mxfp4(raw: Bytes) -> Codes:
    scales = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128)
    return Codes(_bytes_of(MICROSCALED, _nibbles(raw[:, 1:], 16)), scales, None)


KINDS: Mapping[GGMLQuantizationType, Kind] = {
    GGMLQuantizationType.Q4_0: Kind("grouped4", 32, _q4_0),
    GGMLQuantizationType.Q4_1: Kind("grouped4_min", 32, _q4_1),
    GGMLQuantizationType.Q5_0: Kind("grouped5", 32, _q5_0),
    GGMLQuantizationType.Q5_1: Kind("grouped5_min", 32, _q5_1),
    GGMLQuantizationType.Q8_0: Kind("grouped8", 32, _q8_0),
    GGMLQuantizationType.Q2_K: Kind("grouped4_min", 16, _q2_k),
    GGMLQuantizationType.Q3_K: Kind("grouped4", 16, _q3_k),
    GGMLQuantizationType.Q4_K: Kind("grouped4_min", 32, _q4_k),
    GGMLQuantizationType.Q5_K: Kind("grouped5_min", 32, _q5_k),
    GGMLQuantizationType.Q6_K: Kind("grouped6", 16, _q6_k),
    GGMLQuantizationType.IQ4_NL: Kind("grouped8", 32, _iq4_nl),
    GGMLQuantizationType.IQ4_XS: Kind("grouped8", 32, _iq4_xs),
    GGMLQuantizationType.MXFP4: Kind("grouped8", 32, _mxfp4),
}
"""The kinds of ggml that are grouped: those with an even grid of weights as they are; others in as
many bits as what their codes mean, which loses nothing either. Only products of two numbers, the
scales of kinds with ``_K``, are rounded: to fp16."""
