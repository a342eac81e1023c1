"""Chunks are brought to memory: from disk, by computing, within time and memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker.llm import LLM
from kvlinker.store.tiers.base import TierUsage
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.waiting import wait_until

TEXTS = [f"Document {number} tells of {number * 7919}. " * 5 for number in range(12)]


@pytest.fixture
def llm(tmp_path: Path) -> Iterator[LLM]:
    """One whose memory is empty, behind another that has made chunks."""
    settings = tiny_settings(tmp_path)
    with LLM.from_model(tiny_model(), settings) as before:
        before.generate_context_cache(TEXTS)
        before.store.flush()
    with LLM.from_model(tiny_model(), settings) as llm:
        yield llm


def keys_of(llm: LLM) -> list[str]:
    return [cache.chunk_key for cache in llm.caches.list(tenant="default").items]


def brought(llm: LLM, keys: list[str]) -> list[bool]:
    return [llm.store.is_resident(key) for key in keys]


def held_loads(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[str]], Event, Event]:
    """Have the store find nothing: the keys that it is asked for at a time, what is set when it is
    first asked, and what lets it answer."""
    batches: list[list[str]] = []
    began, goes_on = Event(), Event()

    def load(keys: list[str], *_: Any, **__: Any) -> list[Future[None]]:
        batches.append(list(keys))
        began.set()
        assert goes_on.wait(30)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return [nothing for _ in keys]

    monkeypatch.setattr(llm.store, "load", load)
    return batches, began, goes_on


def advance(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have preloading's clock be ahead. Others' is not: an event loop in this process would sleep
    for as long."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + seconds)
    monkeypatch.setattr("kvlinker.service.agents.preloading.time", clock)


def test_chunks_come_from_disk_and_lost_ones_are_computed(llm: LLM) -> None:
    keys = keys_of(llm)
    llm.store.delete(keys[0])
    assert not any(brought(llm, keys))
    unknown = "0" * 64
    assert (
        llm.agents.preloading.begin([*keys, unknown, *keys], 60.0, tenant="default")
        == len(keys) + 1
    )
    wait_until(lambda: llm.agents.preloading.pending == 0)
    wait_until(lambda: all(brought(llm, keys)))
    assert not llm.store.is_resident(unknown)
    assert llm.agents.preloading.begin(keys, 60.0, tenant="default") == 0


def test_nothing_is_brought_when_memory_is_full(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    full = TierUsage("host", 95, 100, 1)
    monkeypatch.setattr(llm.store, "usage", lambda: (full,))
    keys = keys_of(llm)
    llm.agents.preloading.begin(keys, 60.0, tenant="default")
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert not any(brought(llm, keys))


def test_what_takes_too_long_is_given_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    never: Future[Any] = Future()
    monkeypatch.setattr(llm.store, "load", lambda keys, *_, **__: [never for _ in keys])
    assert llm.agents.preloading.begin(keys_of(llm), 0.01, tenant="default") > 0
    wait_until(lambda: llm.agents.preloading.pending == 0)


def test_what_found_no_room_beside_a_request_is_brought_when_that_has_ended(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, *_ = keys = keys_of(llm)
    monkeypatch.setattr(llm.store, "make_room_for", lambda key, nbytes: False)
    llm.agents.preloading.begin([first], 60.0, tenant="default", replaces=True)
    llm.agents.preloading.begin([second], 60.0, tenant="default")
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert not any(brought(llm, keys))
    monkeypatch.undo()
    llm.agents.preloading.retry()
    wait_until(lambda: llm.store.is_resident(first))
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert not llm.store.is_resident(second), "it was to replace none"


def test_what_found_no_room_is_not_tried_for_ever(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *_ = keys_of(llm)
    monkeypatch.setattr(llm.store, "make_room_for", lambda key, nbytes: False)
    llm.agents.preloading.begin([first], 0.5, tenant="default", replaces=True)
    wait_until(lambda: llm.agents.preloading.pending == 0)
    monkeypatch.undo()
    advance(monkeypatch, 1.0)
    llm.agents.preloading.retry()
    assert llm.agents.preloading.pending == 0
    assert not llm.store.is_resident(first)


def test_a_chunk_is_not_given_up_at_anothers_deadline(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One batch has two tenants' chunks; one's time is over before it is known that no tier has
    the other."""
    first, hasty, patient, *_ = keys_of(llm)
    began, goes_on, late = Event(), Event(), Event()

    def load(keys: list[str], *_: Any, **__: Any) -> list[Future[None]]:
        began.set()
        assert goes_on.wait(30)
        if hasty in keys:
            advance(monkeypatch, 2000.0)
            late.set()
        loads: list[Future[None]] = [Future() for _ in keys]
        for each in loads:
            Timer(0.1, each.set_result, [None]).start()
        return loads

    monkeypatch.setattr(llm.store, "load", load)
    llm.store.delete(patient)
    llm.agents.preloading.begin([first], 60.0, tenant="one")
    assert began.wait(30)
    llm.agents.preloading.begin([hasty], 1000.0, tenant="two")
    llm.agents.preloading.begin([patient], 5000.0, tenant="three")
    goes_on.set()
    assert late.wait(30)
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert brought(llm, [hasty, patient]) == [False, True]


def test_tenants_take_turns(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """One who announces thousands of chunks neither leaves another's out, nor lets them wait."""
    monkeypatch.setattr("kvlinker.service.agents.preloading.MOST_PENDING", 40)
    batches, began, goes_on = held_loads(llm, monkeypatch)
    begin = llm.agents.preloading.begin
    begin([f"{number:064x}" for number in range(100)], 60.0, tenant="one")
    assert began.wait(30)
    others = [f"{number:064x}" for number in range(100, 103)]
    assert begin(others, 60.0, tenant="two") == 3
    goes_on.set()
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert set(others) <= set(batches[1])
    assert sum(map(len, batches)) == 43


def test_more_tenants_than_chunks_at_a_time_take_turns(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn goes on where the last one ended, so that the first tenants do not take all."""
    monkeypatch.setattr("kvlinker.service.agents.preloading.AT_ONCE", 2)
    batches, began, goes_on = held_loads(llm, monkeypatch)
    for tenant in "abc":
        keys = [f"{tenant}{number:063x}" for number in range(6)]
        llm.agents.preloading.begin(keys, 60.0, tenant=tenant)
        assert began.wait(30)
    goes_on.set()
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert [key[0] for batch in batches[1:4] for key in batch] == ["a", "b", "c"] * 2
    assert sum(map(len, batches)) == 18


def test_what_is_over_takes_no_turn_and_may_be_asked_for_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, began, goes_on = held_loads(llm, monkeypatch)
    begin = llm.agents.preloading.begin
    begin(["0" * 64], 5000.0, tenant="one")
    assert began.wait(30)
    begin([f"1{number:063x}" for number in range(40)], 5000.0, tenant="one")
    hasty = [f"2{number:063x}" for number in range(40)]
    begin(hasty, 10.0, tenant="two")
    advance(monkeypatch, 1000.0)
    begin([hasty[30], "3" * 64], 1000.0, tenant="two")
    goes_on.set()
    wait_until(lambda: llm.agents.preloading.pending == 0)
    assert {hasty[30], "3" * 64} <= set(batches[1])
    assert sum(map(len, batches)) == 1 + 40 + 2


def test_chunks_that_found_no_room_are_kept_for_each_tenant(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tenant's do not leave out another's."""
    monkeypatch.setattr("kvlinker.service.agents.preloading.MOST_PENDING", 2)
    first, second, third, *_ = keys_of(llm)
    monkeypatch.setattr(llm.store, "make_room_for", lambda key, nbytes: False)
    for tenant, keys in (("one", [first, second]), ("two", [third])):
        llm.agents.preloading.begin(keys, 60.0, tenant=tenant, replaces=True)
        wait_until(lambda: llm.agents.preloading.pending == 0)
    monkeypatch.undo()
    llm.agents.preloading.retry()
    wait_until(lambda: all(brought(llm, [first, second, third])))
