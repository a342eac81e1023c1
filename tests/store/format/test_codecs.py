"""Codecs: what comes back, how far off it may be, and how much room it takes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker.settings import load_settings
from kvlinker.store.format.codecs import (
    Layout,
    Parts,
    Room,
    base,
    find_codec,
    known_codecs,
    register,
)

PLAIN = [name for name, codec in known_codecs().items() if not codec.compresses]

ERRORS = {"raw": 0.0, "int8": 0.01, "int4": 0.15}
"""Largest relative error (L2) of heads of normal numbers."""

BYTES = {"raw": 2.0, "int8": 1 + 2 / 64, "int4": 0.5 + 2 / 64}
"""Per number of bfloat16, in heads of 64."""


def heads(
    seed: int = 0, shape: tuple[int, ...] = (2, 33, 64), dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_numbers_come_back(subtests: pytest.Subtests) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for name, dtype, dim in product(PLAIN, dtypes, (2, 6, 32, 64, 96, 128, 256)):
        with subtests.test(name, dtype=dtype, dim=dim):
            given_heads = heads(shape=(2, 17, dim), dtype=dtype)
            decoded = find_codec(name).decode(find_codec(name).encode(given_heads), dtype)
            assert decoded.dtype == dtype
            assert decoded.shape == given_heads.shape
            error = (decoded.float() - given_heads.float()).norm() / given_heads.float().norm()
            rounding = 0.01 if dtype == torch.bfloat16 and name != "raw" else 0
            assert error <= ERRORS[name] + rounding


@pytest.mark.parametrize("name", PLAIN)
def test_room(name: str) -> None:
    given_heads = heads()
    parts = find_codec(name).encode(given_heads)
    assert sum(part.nbytes for part in parts.values()) == BYTES[name] * given_heads.numel()
    assert all(part.is_contiguous() for part in parts.values())


def test_a_rotation_helps_where_one_number_is_far_out() -> None:
    outlying = heads(dtype=torch.float32)
    outlying[..., 5] *= 30
    codec = find_codec("int4")
    decoded = codec.decode(codec.encode(outlying), torch.float32)
    others = [index for index in range(64) if index != 5]
    plain = (
        (outlying / (outlying.abs().amax(-1, keepdim=True) / 7)).round()
        * outlying.abs().amax(-1, keepdim=True)
        / 7
    )
    assert (decoded - outlying)[..., others].norm() < 0.7 * (plain - outlying)[..., others].norm()


@pytest.mark.parametrize("name", PLAIN)
def test_zeros_stay_zeros(name: str) -> None:
    codec = find_codec(name)
    assert not codec.decode(codec.encode(torch.zeros(2, 3, 64)), torch.float32).any()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_without_a_scale_are_refused(name: str, bad: float) -> None:
    given_heads = heads()
    given_heads[1, 2, 3] = bad
    with pytest.raises(ValueError, match="not finite"):
        find_codec(name).encode(given_heads)


@given(st.integers(0, 2**16), st.floats(1e-3, 1e3))
def test_int8_is_off_by_half_a_step_at_most(seed: int, size: float) -> None:
    given_heads = heads(seed, (1, 4, 32), torch.float32) * size
    codec = find_codec("int8")
    decoded = codec.decode(codec.encode(given_heads), torch.float32)
    step = given_heads.abs().amax(-1, keepdim=True) / 127
    assert ((decoded - given_heads).abs() <= 0.5 * step * 1.13).all()  # the scale itself is rounded


def test_unknown_codecs() -> None:
    with pytest.raises(InvalidRequestError, match="int8"):
        find_codec("int2")


class Halves:
    """Writes numbers of half precision."""

    name = "halves"
    compresses = False

    def layout(self, dtype: torch.dtype) -> Layout:
        return {"": (torch.float16, 3)}

    def encode(self, heads: torch.Tensor) -> Parts:
        return {"": heads.half().contiguous()}

    def decode(self, parts: Parts, dtype: torch.dtype, room: Room = torch.empty) -> torch.Tensor:
        return parts[""].to(dtype)


def test_a_codec_of_ones_own_is_found_by_name_also_compressed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(base._registry, "_values", dict(base._registry.known()))
    with pytest.raises(InvalidRequestError, match=r"'halves'.*it must be one of raw, int8, int4"):
        load_settings(disk_codec="halves")
    assert register(Halves) is register(Halves) is Halves
    assert find_codec("halves").name == "halves"
    assert find_codec("halves+zstd").compresses
    assert load_settings(disk_codec="halves+zstd").disk_codec == "halves+zstd"

    class Other(Halves):
        name = "raw"

    class Sum(Halves):
        name = "one+two"

    with pytest.raises(
        ValueError, match=r"codec 'raw' is registered already, by kvlinker.store.format.codecs.base"
    ):
        register(Other)
    with pytest.raises(ValueError, match=r"'one\+two' has a '\+' in its name"):
        register(Sum)
