"""Bytes from far away: the right ones, in few journeys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.store.format.byte_source import Bytes, ReadAheadSource

DATA = np.random.default_rng(1).integers(0, 256, 1000, dtype=np.uint8)


def source(journeys: list[tuple[int, int]], ahead: int) -> ReadAheadSource:
    def fetch(offset: int, length: int) -> Bytes:
        assert 0 <= offset <= offset + length <= len(DATA)
        journeys.append((offset, length))
        return DATA[offset : offset + length]

    return ReadAheadSource(len(DATA), fetch, ahead_bytes=ahead)


@given(
    reads=st.lists(st.tuples(st.integers(0, 1100), st.integers(0, 300)), max_size=20),
    ahead=st.integers(1, 400),
)
def test_reads_give_the_bytes_that_are_there(reads: list[tuple[int, int]], ahead: int) -> None:
    far = source([], ahead)
    for offset, length in reads:
        if offset + length > len(DATA):
            with pytest.raises(EOFError):
                far.read(offset, length)
        else:
            assert np.array_equal(far.read(offset, length), DATA[offset : offset + length])


def test_reads_that_follow_one_another_share_journeys_and_fetch_nothing_twice() -> None:
    journeys: list[tuple[int, int]] = []
    far = source(journeys, 220)
    for offset in range(0, 1000, 100):
        assert np.array_equal(far.read(offset, 100), DATA[offset : offset + 100])
    assert journeys == [(0, 220), (220, 220), (440, 220), (660, 220), (880, 120)]


def test_a_long_read_is_one_journey() -> None:
    journeys: list[tuple[int, int]] = []
    far = source(journeys, 100)
    far.read(10, 900)
    assert journeys == [(10, 990)]
    far.read(910, 90)
    assert len(journeys) == 1
