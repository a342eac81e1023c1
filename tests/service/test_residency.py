"""Reports of what is in memory: whoever follows them knows what a whole report would say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import ChunkNamed
from kvlinker.base.types.residency import MEMORY, KnownChunk, ResidencyReport
from kvlinker.service.residency import (
    COSTED_TOKENS,
    KEPT_CHANGES,
    LOOK_SECONDS,
    NAMES_PER_CHUNK,
    Residency,
)
from kvlinker.store import ChunkStore
from kvlinker.store.loading.bandwidths import Bandwidths

KEYS = "abcd"


@dataclass
class SharedTier:
    name: str
    place: str
    shared: bool = True
    keys: set[str] = field(default_factory=set)
    looks: int = 0

    def sizes(self, keys: Iterable[str]) -> dict[str, int] | None:
        self.looks += 1
        return dict.fromkeys(self.keys & set(keys), 1)


class Store:
    """A memory, a disk, and a tier that others share."""

    def __init__(self) -> None:
        self.own: dict[str, str] = {}
        self.redis = SharedTier("redis", "digest of redis")
        self.bandwidths = Bandwidths()

    def own_places(self, *, limit: int) -> dict[str, str]:
        return dict(self.own)

    def places(self) -> dict[str, str]:
        return {tier.name: tier.place for tier in self.slower_tiers()}

    def slower_tiers(self) -> tuple[SharedTier, ...]:
        return (SharedTier("disk", "/data", shared=False), self.redis)


class Follower:
    """A router's view."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.number = 0
        self.chunks: dict[str, KnownChunk] = {}

    def take(self, report: ResidencyReport) -> None:
        if report.whole:
            self.chunks = {}
        for key in report.gone:
            self.chunks.pop(key, None)
        self.chunks |= report.chunks
        self.epoch, self.number = report.epoch, report.number


def kept(tokens: int) -> int:
    """The bytes of a chunk of a hybrid, whose layers with a state keep a map, however long it
    is."""
    return 1000 * tokens + 512_000


def made(clock: Callable[[], float] = lambda: 0.0) -> tuple[Store, Residency]:
    store = Store()
    return store, Residency(cast(ChunkStore, store), kv_bytes=kept, clock=clock)


def name(residency: Residency, names: Iterable[tuple[str, str]]) -> None:
    for key, given_name in names:
        residency.listen(ChunkNamed(key, (given_name,), "default"))


STEPS = st.lists(
    st.tuples(
        st.dictionaries(st.sampled_from(KEYS), st.sampled_from(["memory", "disk"])),
        st.sets(st.sampled_from(KEYS)),
        st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from("xyz")), max_size=2),
        st.sets(st.integers(0, 2)),
    ),
    max_size=12,
)


@given(STEPS)
def test_followers_know_what_is_there_however_seldom_they_ask(
    steps: list[tuple[dict[str, str], set[str], list[tuple[str, str]], set[int]]],
) -> None:
    looks = count(step=LOOK_SECONDS)
    store, residency = made(lambda: float(next(looks)))
    followers = [Follower() for _ in range(3)]
    for places, shared, names, asking in steps:
        store.own, store.redis.keys = places, shared
        name(residency, names)
        for number in sorted(asking):
            follower = followers[number]
            follower.take(residency.report(follower.epoch, follower.number))
            whole = residency.report()
            assert follower.chunks == whole.chunks
            assert {
                key: tier
                for key, chunk in follower.chunks.items()
                for tier in chunk.tiers
                if tier != "redis"
            } == places
            for key, chunk in follower.chunks.items():
                assert key in places or chunk.names
                assert ("redis" in chunk.tiers) == (key in shared and bool(chunk.names))


def test_who_knows_too_little_gets_everything() -> None:
    store, residency = made()
    store.own = {"a": MEMORY}
    first = residency.report()
    assert first.whole
    assert not residency.report(first.epoch, first.number).whole
    assert residency.report("another run", first.number).whole
    assert residency.report(first.epoch, first.number + 1).whole, "a number that was not told yet"
    for number in range(KEPT_CHANGES + 1):
        store.own = {"b" if number % 2 else "c": MEMORY}
        residency.report()
    assert residency.report(first.epoch, first.number).whole


def test_what_an_engine_has_in_memory_counts_where_the_store_has_it_at_all() -> None:
    store = Store()
    store.own = {"a": "disk", "b": "disk"}
    residency = Residency(
        cast(ChunkStore, store), kv_bytes=kept, resident_keys=lambda: frozenset("ac")
    )
    chunks = residency.report().chunks
    assert {key: chunk.tiers for key, chunk in chunks.items()} == {"a": (MEMORY,), "b": ("disk",)}


def test_the_latest_names_stay() -> None:
    store, residency = made()
    store.own = {"a": MEMORY}
    name(residency, [("a", str(n)) for n in range(NAMES_PER_CHUNK + 3)])
    names = residency.report().chunks["a"].names
    assert names == tuple(str(n) for n in range(3, NAMES_PER_CHUNK + 3))


def test_shared_tiers_are_asked_once_in_a_while() -> None:
    now = 0.0
    store, residency = made(lambda: now)
    name(residency, [("a", "x")])
    residency.report()
    store.redis.keys = {"a"}
    assert residency.report().chunks == {}
    assert store.redis.looks == 1
    now = LOOK_SECONDS
    assert residency.report().chunks == {"a": KnownChunk(("redis",), ("x",))}
    assert store.redis.looks == 2


def test_costs_are_what_was_measured() -> None:
    store, residency = made()
    store.bandwidths.note("disk", 10**6, 0.5)
    disk, redis = residency.costs()["disk"], residency.costs()["redis"]
    assert disk.seconds_per_token == pytest.approx(0.5e-6 * kept(COSTED_TOKENS) / COSTED_TOKENS)
    assert disk.place is None, "nobody else has it"
    assert redis.seconds_per_token is None
    assert redis.place == "digest of redis"
