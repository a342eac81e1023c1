"""Which chunks are hot: those that were wanted most, lately."""

from __future__ import annotations

from kvlinker_fleet.costs import HALVED_AFTER, HotChunks


def test_the_hottest_come_first_and_none_that_was_wanted_once() -> None:
    hot = HotChunks()
    hot.note([1, 2, 3])
    hot.note([2, 3])
    hot.note([3])
    assert hot.hottest(10) == [3, 2]
    assert hot.hottest(1) == [3]


def test_what_was_hot_long_ago_counts_less() -> None:
    hot = HotChunks()
    hot.note([1] * 10)
    for number in range(HALVED_AFTER):
        hot.note([1000 + number])
    assert hot.hottest(10) == [1]
    hot.note([2] * 8)
    assert hot.hottest(10) == [2, 1]
    assert len(hot._uses) < 20, "what was wanted once is not remembered for ever"
