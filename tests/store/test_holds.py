"""Chunks in use: held in memory by any number of requests, within a budget, until the last one
ends."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.base.events import Events
from kvlinker.store import HostTier
from kvlinker.store.chunk_store import Hold, Holds

SIZES = {"a": 3, "b": 4, "c": 5, "d": 20}


class Memory(HostTier):
    """Notes which keys are held."""

    def __init__(self, budget_bytes: int) -> None:
        super().__init__(budget_bytes, Events())
        self.held: set[str] = set()

    def hold(self, keys: Iterable[str]) -> None:
        assert self.held.isdisjoint(keys)
        self.held.update(keys)

    def release(self, keys: Iterable[str]) -> None:
        assert self.held.issuperset(keys)
        self.held.difference_update(keys)


def sizes(keys: str) -> dict[str, int]:
    return {key: SIZES[key] for key in keys}


def taken(holds: Holds, keys: str) -> Hold:
    hold = holds.take(sizes(keys))
    assert hold is not None
    return hold


def test_chunks_of_two_requests_count_once_and_stay_until_both_have_ended() -> None:
    memory = Memory(12)
    holds = Holds([memory])
    first, second = taken(holds, "ab"), taken(holds, "bc")
    assert holds.nbytes == 12
    first.release()
    assert memory.held == {"b", "c"}
    assert holds.nbytes == 9
    second.release()
    assert not memory.held
    assert holds.nbytes == 0


def test_chunks_in_use_that_are_not_there_yet_are_awaited() -> None:
    holds = Holds([Memory(12)])
    hold = taken(holds, "ab")
    assert holds.awaited_bytes({"a"}.__contains__) == SIZES["b"]
    hold.release()
    assert holds.awaited_bytes(set().__contains__) == 0


def test_what_exceeds_the_budget_is_held_only_if_nothing_else_is() -> None:
    memory = Memory(10)
    holds = Holds([memory, Memory(1000)])
    first = taken(holds, "a")
    assert holds.take(sizes("d")) is None
    assert memory.held == {"a"}
    first.release()
    alone = taken(holds, "d")
    assert holds.take(sizes("a")) is None
    assert holds.take({}) is not None, "a request without chunks needs no room"
    assert holds.take(sizes("d")) is None, "the next one would keep the budget exceeded"
    alone.release()
    assert not memory.held


def test_a_request_that_has_ended_holds_no_more() -> None:
    memory = Memory(10)
    holds = Holds([memory])
    hold = taken(holds, "a")
    hold.extend(sizes("ab"))
    assert memory.held == {"a", "b"}
    hold.release()
    hold.extend(sizes("c"))
    assert not memory.held
    with pytest.raises(AssertionError):
        hold.release()


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["take", "extend", "share", "release"]),
            st.sets(st.sampled_from("abcd")),
            st.data(),
        ),
        max_size=30,
    )
)
def test_exactly_what_requests_use_is_held(
    calls: list[tuple[str, set[str], st.DataObject]],
) -> None:
    memory = Memory(12)
    holds = Holds([memory])
    used: list[tuple[Hold, set[str]]] = []
    for call, keys, data in calls:
        wanted = {key: SIZES[key] for key in keys}
        if call == "take":
            hold = holds.take(wanted)
            if hold is not None:
                used.append((hold, set(keys)))
        elif used:
            entry = data.draw(st.sampled_from(used))
            if call == "extend":
                entry[0].extend(wanted)
                entry[1].update(keys)
            elif call == "share":
                used.append((entry[0].share(), entry[1]))
            else:
                used.remove(entry)
                entry[0].release()
        held = set().union(*(keys for _, keys in used))
        assert memory.held == held
        assert holds.nbytes == sum(SIZES[key] for key in held)
