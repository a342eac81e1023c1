"""Expected chunks stay, at the cost of their owner's other chunks alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.events import ChunkNamed, Event, Events, EvictionSwap
from kvlinker.store import eviction
from kvlinker.store.eviction import LEAST_GRACE, EvictionIndex, NextUses


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def known(owners: dict[str, str], events: Events | None = None) -> tuple[NextUses, Clock]:
    clock = Clock()
    uses = NextUses(events or Events(), clock)
    for key, owner in owners.items():
        uses.listen(ChunkNamed(key, (), owner))
    return uses, clock


def index_of(uses: NextUses | None, sizes: dict[str, int], budget: int) -> EvictionIndex:
    index = EvictionIndex(budget, next_uses=uses)
    for key, nbytes in sizes.items():
        index.add(key, nbytes)
    return index


def gone(index: EvictionIndex, nbytes: int) -> list[str]:
    return [key for key, _ in index.make_room(nbytes)]


def test_the_chunk_that_is_needed_last_goes() -> None:
    uses, _ = known(dict.fromkeys("abcd", "one"))
    index = index_of(uses, dict.fromkeys("abcd", 1), budget=4)
    uses.expect("one", "flow", {"a": 5, "b": 9, "d": 1})
    assert gone(index, 1) == ["c"]
    assert gone(index, 2) == ["b"]
    assert gone(index, 3) == ["a"]
    assert index.keys() == ("d",)


def test_without_expectations_the_order_is_as_ever() -> None:
    uses, _ = known(dict.fromkeys("abc", "one"))
    assert gone(index_of(uses, dict.fromkeys("abc", 1), budget=3), 2) == ["a", "b"]


def test_a_chunk_that_alone_is_its_owners_goes_in_its_turn() -> None:
    uses, _ = known({"a": "one", "b": "two", "c": "shared"})
    uses.expect("one", "flow", {"a": 1, "b": 1, "c": 1})
    assert uses.due("b") == uses.due("c") == math.inf  # others' chunks do not count
    assert gone(index_of(uses, dict.fromkeys("abc", 1), budget=3), 1) == ["a"]


def test_expectations_end() -> None:
    events: list[Event] = []
    published = Events()
    published.subscribe(events.append)
    uses, clock = known(dict.fromkeys("abc", "one"), published)
    uses.expect("one", "flow", {"a": 2})
    assert uses.due("a") == 2
    clock.now = 2 + LEAST_GRACE - 1
    assert uses.needed_last("ab") == "b"
    assert events == [EvictionSwap()]
    clock.now += 1
    assert uses.needed_last("ab") == "a"
    uses.expect("one", "flow", {"a": 500})
    clock.now += 999
    assert uses.needed_last("ab") == "b"
    uses.used("one", "other flow", {"a"})
    assert uses.needed_last("ab") == "b"
    uses.used("one", "flow", {"a"})
    assert uses.needed_last("ab") == "a"


def test_the_newest_plans_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "MOST_PLANS", 2)
    monkeypatch.setattr(eviction, "MOST_OWNERS", 2)
    uses, _ = known({"a": "one", "b": "two", "c": "three"})
    for plan in ("first", "second", "third"):
        uses.expect("one", plan, {"a": 1} if plan == "first" else {})
    assert uses.due("a") == math.inf
    for owner, key in (("one", "a"), ("two", "b"), ("three", "c")):
        uses.expect(owner, "flow", {key: 1})
    assert [uses.due(key) for key in "abc"] == [math.inf, 1, 1]


def test_an_expected_chunk_takes_the_room_of_its_owners_others() -> None:
    uses, _ = known({"a": "one", "b": "two", "c": "one", "d": "one", "new": "one"})
    index = index_of(uses, dict.fromkeys("abcd", 1), budget=4)
    uses.expect("one", "flow", {"a": 1, "new": 2, "d": 3})
    assert index.make_room_for("new", 3) is None
    assert index.used_bytes == 4
    assert index.make_room_for("new", 2) == [("c", 1), ("d", 1)]
    assert index.keys() == ("a", "b")
    assert index.make_room_for("new", 2) == []


@given(
    st.dictionaries(st.integers(0, 15).map(str), st.integers(1, 4), min_size=1),
    st.dictionaries(st.integers(0, 15).map(str), st.floats(0, 100)),
    st.integers(0, 40),
)
def test_what_one_tenant_expects_evicts_no_more_of_anothers(
    sizes: dict[str, int], hinted: dict[str, float], nbytes: int
) -> None:
    owners = {key: "one" if int(key) % 2 else "two" for key in sizes}
    uses, _ = known(owners)
    uses.expect("one", "flow", hinted)
    budget = sum(sizes.values())
    plain, hinting = (set(gone(index_of(each, sizes, budget), nbytes)) for each in (None, uses))
    assert {key for key in hinting if owners[key] == "two"} <= plain


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["expect", "used", "named", "later"]),
        st.sampled_from(["one", "two"]),
        st.sampled_from("pqr"),
        st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 100), max_size=4),
    ),
    max_size=20,
)


@given(steps=STEPS)
def test_the_soonest_use_of_any_plan_counts(
    steps: list[tuple[str, str, str, dict[str, int]]],
) -> None:
    owners = dict.fromkeys("abc", "one") | dict.fromkeys("def", "two")
    uses, clock = known(owners)
    plans: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for what, owner, plan, seconds in steps:
        if what == "expect":
            uses.expect(owner, plan, seconds)
            plans[owner, plan] = {
                key: (clock.now + ahead, clock.now + ahead + max(ahead, LEAST_GRACE))
                for key, ahead in seconds.items()
                if owners[key] == owner
            }
        elif what == "used":
            uses.used(owner, plan, seconds.keys())
            for key in seconds:
                plans.get((owner, plan), {}).pop(key, None)
        elif what == "named":
            for key in seconds:
                uses.listen(ChunkNamed(key, (), owner))
                if owners[key] != owner:
                    for found in plans.values():
                        found.pop(key, None)
                owners[key] = owner
        else:
            clock.now += 25
        for key in owners:
            dues = [found[key] for found in plans.values() if key in found]
            live = [at for at, until in dues if until > clock.now]
            assert uses.due(key) == min(live, default=math.inf)


def test_many_plans_of_one_chunk_are_compared_once() -> None:
    """Evictions ask for a thousand chunks at a time, under the lock of their tier."""

    class Counting(dict[str, Any]):
        reads = 0

        def values(self) -> Any:
            self.reads += 1
            return super().values()

    uses, _ = known({"a": "one", "b": "one"})
    for number in range(eviction.MOST_PLANS):
        uses.expect("one", str(number), {"a": 50 + number, "b": 10})
    plans = uses._uses["a"].plans = Counting(uses._uses["a"].plans)
    assert {uses.due("a") for _ in range(100)} == {50}
    assert plans.reads == 1


def test_a_chunk_that_is_another_owners_is_expected_by_that_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eviction, "MOST_OWNED", 2)
    uses, _ = known({"a": "one", "b": "one"})
    uses.expect("one", "flow", {"a": 1, "b": 2})
    uses.listen(ChunkNamed("a", (), "two"))
    uses.expect("two", "flow", {"a": 3})
    uses.used("one", "flow", {"a", "b"})
    assert [uses.due(key) for key in "ab"] == [3, math.inf]
    for key in "cd":  # the last of which are remembered
        uses.listen(ChunkNamed(key, (), "one"))
    assert uses.due("a") == math.inf
    uses.expect("two", "flow", {})
