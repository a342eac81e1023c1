"""Reports of what is in memory: whoever follows them knows what a whole report would say."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import ChunkNamed
from kvlinker.base.types.residency import ResidencyReport
from kvlinker.service.residency import KEPT_CHANGES, NAMES_PER_CHUNK, Residency
from kvlinker.store import ChunkStore

KEYS = "abcd"


class Store:
    def __init__(self) -> None:
        self.keys: set[str] = set()

    def resident_keys(self) -> frozenset[str]:
        return frozenset(self.keys)


class Follower:
    """A router's view."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.number = 0
        self.resident: dict[str, tuple[str, ...]] = {}

    def take(self, report: ResidencyReport) -> None:
        if report.whole:
            self.resident = {}
        for key in report.gone:
            self.resident.pop(key, None)
        self.resident |= report.resident
        self.epoch, self.number = report.epoch, report.number


def made() -> tuple[Store, Residency]:
    store = Store()
    return store, Residency(cast(ChunkStore, store))


def name(residency: Residency, names: Iterable[tuple[str, str]]) -> None:
    for key, given_name in names:
        residency.listen(ChunkNamed(key, given_name))


STEPS = st.lists(
    st.tuples(
        st.sets(st.sampled_from(KEYS)),
        st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from("xyz")), max_size=2),
        st.sets(st.integers(0, 2)),
    ),
    max_size=12,
)


@given(STEPS)
def test_followers_know_what_is_there_however_seldom_they_ask(
    steps: list[tuple[set[str], list[tuple[str, str]], set[int]]],
) -> None:
    store, residency = made()
    followers = [Follower() for _ in range(3)]
    for keys, names, asking in steps:
        store.keys = keys
        name(residency, names)
        for number in sorted(asking):
            follower = followers[number]
            follower.take(residency.report(follower.epoch, follower.number))
            whole = residency.report()
            assert follower.resident == whole.resident
            assert follower.resident.keys() == keys


def test_who_knows_too_little_gets_everything() -> None:
    store, residency = made()
    store.keys = {"a"}
    first = residency.report()
    assert first.whole
    assert not residency.report(first.epoch, first.number).whole
    assert residency.report("another run", first.number).whole
    assert residency.report(first.epoch, first.number + 1).whole, "a number that was not told yet"
    for number in range(KEPT_CHANGES + 1):
        store.keys = {"b" if number % 2 else "c"}
        residency.report()
    assert residency.report(first.epoch, first.number).whole


def test_the_latest_names_stay() -> None:
    store, residency = made()
    store.keys = {"a"}
    name(residency, [("a", str(n)) for n in range(NAMES_PER_CHUNK + 3)])
    names = residency.report().resident["a"]
    assert names == tuple(str(n) for n in range(3, NAMES_PER_CHUNK + 3))
