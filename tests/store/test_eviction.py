"""The accounting of tiers: budgets, orders of eviction, and pins."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlinker.base.types.chunks import Eviction
from kvlinker.store.eviction import LEAST_SHARE, MOST_REUSE, PINNED_SHARE, EvictionIndex, use_weight
from tests.properties import examples

KEYS = st.sampled_from("abcdefgh")
WEIGHTS = st.sampled_from([0.0, 1.0, 1.5, 16.0, 200.0])
ORDERS = st.sampled_from(["lru", "reuse"])


class Model:
    """What an index should do, in the plainest terms: a list in order of last use, searched from
    end to end."""

    def __init__(self, eviction: str) -> None:
        self.eviction = eviction
        self.age = 0.0
        self.used: list[str] = []  # the last one used last
        self.sizes: dict[str, int] = {}
        self.reuse: dict[str, float] = {}
        self.priority: dict[str, float] = {}

    def use(self, key: str, weight: float) -> None:
        self.used = [other for other in self.used if other != key] + [key]
        self.reuse[key] = min(self.reuse.get(key, 0.0) + weight, MOST_REUSE)
        self.priority[key] = self.age + self.reuse[key] if self.eviction == "reuse" else 0.0

    def add(self, key: str, nbytes: int) -> None:
        self.sizes[key] = nbytes
        self.use(key, 1.0)

    def remove(self, key: str) -> None:
        self.used.remove(key)
        for known in (self.sizes, self.reuse, self.priority):
            del known[key]

    def in_order(self, pinned: frozenset[str], held: Set[str]) -> list[str]:
        """Pinned ones behind others, held ones last."""

        def order(key: str) -> tuple[bool, bool, float, int]:
            return (
                key in held,
                key in pinned and key not in held,
                self.priority[key],
                self.used.index(key),
            )

        return sorted(self.used, key=order)

    def evict(self, pinned: frozenset[str], held: Set[str], excess: bool) -> str:
        """The next one to go; a pinned one where they exceed their share, and never a held one."""
        free = [key for key in self.in_order(pinned, held) if key not in held]
        key = next((key for key in free if (key in pinned) == excess), free[0])
        if key not in pinned:
            self.age = max(self.age, self.priority[key])
        self.remove(key)
        return key


class IndexMachine(RuleBasedStateMachine):
    """Any sequence of calls leaves the index as the model."""

    @initialize(budget=st.integers(0, 200), eviction=ORDERS)
    def begin(self, budget: int, eviction: Eviction) -> None:
        self.index = EvictionIndex(budget, eviction=eviction)
        self.model = Model(eviction)
        self.pinned: frozenset[str] = frozenset()
        self.held: set[str] = set()

    @rule(key=KEYS, nbytes=st.integers(1, 60))
    def put(self, key: str, nbytes: int) -> None:
        if key in self.model.sizes or not (key in self.held or self.index.fits(nbytes)):
            return
        self.make_room(nbytes)
        self.index.add(key, nbytes)
        self.model.add(key, nbytes)

    def make_room(self, nbytes: int) -> None:
        most_pinned = int(self.index.budget_bytes * PINNED_SHARE)
        for gone, size in self.index.make_room(nbytes):
            pinned = (self.pinned - self.held) & self.model.sizes.keys()
            excess = sum(self.model.sizes[key] for key in pinned) > most_pinned
            assert self.model.sizes[gone] == size
            assert gone == self.model.evict(self.pinned, self.held, excess)

    @rule(key=KEYS)
    def hold(self, key: str) -> None:
        self.index.hold([key])
        self.held.add(key)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)))
        self.index.release([key])
        self.held.remove(key)
        self.make_room(0)

    @rule(key=KEYS, weight=WEIGHTS)
    def use(self, key: str, weight: float) -> None:
        known = key in self.model.sizes
        assert self.index.touch(key, weight) == known
        if known:
            self.model.use(key, weight)

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        known = key in self.model.sizes
        assert self.index.remove(key) == known
        if known:
            self.model.remove(key)

    @rule(keys=st.frozensets(KEYS))
    def pin(self, keys: frozenset[str]) -> None:
        self.pinned = keys
        self.index.set_pinned(keys)

    @precondition(lambda self: hasattr(self, "index"))
    @invariant()
    def agrees(self) -> None:
        assert list(self.index.keys()) == self.model.in_order(self.pinned, self.held)
        held_bytes = sum(self.model.sizes.get(key, 0) for key in self.held)
        assert {key: self.index.nbytes(key) for key in self.index.keys()} == self.model.sizes  # noqa: SIM118
        assert self.index.used_bytes == sum(self.model.sizes.values())
        assert self.index.used_bytes <= max(self.index.budget_bytes, held_bytes)
        assert all(self.index.is_held(key) == (key in self.held) for key in "abcdefgh")
        assert len(self.index) == len(self.model.sizes)
        assert all((key in self.index) == (key in self.model.sizes) for key in "abcdefgh")
        assert self.index.fits(
            self.index.budget_bytes - int(self.index.budget_bytes * PINNED_SHARE) - held_bytes
        )


TestIndex = IndexMachine.TestCase
TestIndex.settings = examples(150, stateful_step_count=40, deadline=None)


def put(index: EvictionIndex, key: str, nbytes: int = 10) -> list[str]:
    """Returns what made room."""
    gone = [evicted for evicted, _ in index.make_room(nbytes)]
    index.add(key, nbytes)
    return gone


def test_pinned_keys_stay_while_others_come_and_go() -> None:
    index = EvictionIndex(100, pinned={"p", "q"})
    for key, nbytes in (("p", 30), ("a", 30), ("q", 30)):
        index.add(key, nbytes)
    assert index.keys() == ("a", "p", "q")
    assert index.make_room(40) == [("a", 30)]
    index.add("b", 40)
    assert not index.fits(41)
    assert index.make_room(40) == [("b", 40)]
    index.set_pinned(frozenset({"q"}))
    assert index.fits(70)
    assert index.make_room(60) == [("p", 30)]
    assert index.keys() == ("q",)


def test_pins_leave_a_share_to_others() -> None:
    index = EvictionIndex(100, pinned=set("pqr"))
    for key in "pqr":
        index.add(key, 30)
    assert index.fits(20)
    assert not index.fits(21)
    assert index.make_room(20) == [("p", 30)]


def test_what_is_cheap_to_reuse_stays_when_it_was_used_before() -> None:
    gone_first: dict[Eviction, str] = {"lru": "cheap", "reuse": "dear"}
    for eviction, gone in gone_first.items():
        index = EvictionIndex(20, eviction=eviction)
        for key, recomputed in (("cheap", 0.1), ("dear", 0.9)):
            put(index, key)
            index.touch(key, use_weight(recomputed))
        assert put(index, "new") == [gone]


def test_newcomers_do_not_only_push_each_other_out_and_old_favourites_go() -> None:
    index = EvictionIndex(30, eviction="reuse")
    put(index, "favourite")
    for _ in range(1000):
        index.touch("favourite", use_weight(0.0))
    gone = [key for number in range(1000) for key in put(index, str(number))]
    at = gone.index("favourite")
    assert (
        2 * (MOST_REUSE - 1) <= at <= 2 * (MOST_REUSE + 1)
    )  # two places turn over at each step of the age
    assert gone[:at] == [str(number) for number in range(at)]


def test_a_newcomer_outlives_what_is_no_longer_used() -> None:
    index = EvictionIndex(30, eviction="reuse")
    for key in "abc":
        put(index, key)
        index.touch(key, 4.0)
    assert [key for key in "defg" for key in put(index, key)] == ["a", "b", "c", "d"]


@given(st.floats(0, 1))
def test_weights_are_bounded_and_fall_with_what_is_computed_again(recomputed: float) -> None:
    weight = use_weight(recomputed)
    assert 1 <= weight <= 1 / LEAST_SHARE
    assert weight == pytest.approx(1 / max(recomputed, LEAST_SHARE))
    assert use_weight(min(1.0, recomputed + 0.1)) <= weight


@pytest.mark.parametrize("eviction", ["lru", "reuse"])
def test_filling_is_adding_one_by_one(eviction: Eviction) -> None:
    sizes = [(f"key {number}", number % 7 + 1) for number in range(50)]
    pinned = {"key 3", "key 40", "absent"}
    filled, added = (EvictionIndex(90, pinned, eviction) for _ in range(2))
    filled.fill(sizes)
    for key, nbytes in sizes:
        added.add(key, nbytes)
    assert (filled.keys(), filled.used_bytes, len(filled)) == (
        added.keys(),
        added.used_bytes,
        len(added),
    )
    for index in (filled, added):
        index.touch("key 5", 2.0)
    assert filled.make_room(30) == added.make_room(30)
    assert filled.keys() == added.keys()
