"""What is deleted goes from every tier, however late a tier can be told, and whatever a request
stores again."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.types.tenants import Quota, Quotas
from kvlinker.store import StoreError
from kvlinker.store.deletions import LONGEST_REQUEST_SECONDS, LONGEST_TRANSACTION_SECONDS
from tests.redis_server import RedisServer
from tests.store.crash_work import CLOCKED, Shared, State, chunk_of, open_state


class Clock:
    """Unix seconds, as the tests say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.time()
        for module in CLOCKED:
            monkeypatch.setattr(f"{module}.time", self)

    def time(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def create(state: State, *numbers: int, **options: Any) -> list[str]:
    created = state.caches.create(
        [str(number) for number in numbers], tenant="anna", **options
    ).result()
    return [cache.id for cache in created]


@pytest.mark.whole
def test_a_deletion_in_an_outage_that_outlasts_the_process(
    tmp_path: Path, frail_redis: RedisServer, clock: Clock
) -> None:
    shared = Shared(frail_redis.url)
    with closing(open_state(tmp_path, shared)) as state:
        (kept, gone) = create(state, 1, 2)
        state.store.flush()
        assert len(frail_redis.client.keys("kvlinker:chunk:*")) == 2
        frail_redis.hang()
        state.caches.delete(gone, tenant="anna")
    clock.now += 2 * LONGEST_REQUEST_SECONDS
    with closing(open_state(tmp_path, shared)) as state:
        assert state.caches.get(kept, tenant="anna")
    frail_redis.go_on()
    with closing(open_state(tmp_path, shared)) as state:
        (key,) = frail_redis.client.keys("kvlinker:chunk:*")
        assert key.decode().endswith(state.caches.get(kept, tenant="anna").chunk_key)
        assert state.catalog.released(0, clock.now) == {}


@pytest.mark.parametrize("seconds", [0.0, 5.0, LONGEST_REQUEST_SECONDS - 1])
def test_what_a_request_stores_again_goes_with_the_next_sweep(
    tmp_path: Path, clock: Clock, seconds: float
) -> None:
    with closing(open_state(tmp_path)) as state:
        (one,) = create(state, 1)
        state.caches.delete(one, tenant="anna")
        state.caches.sweep()
        clock.now += seconds
        state.caches.sweep()
        state.engine.use(chunk_of(1), "anna")
        state.store.flush()
        assert state.store.keys()
        state.caches.sweep()
        assert not state.store.keys()
        create(state, 1)
        state.caches.sweep()
        assert state.store.keys()


def test_what_is_created_again_outlasts_a_sweep_in_the_midst(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its KV is there before the catalog says that it is held."""
    with closing(open_state(tmp_path)) as state:
        (one,) = create(state, 1)
        state.caches.delete(one, tenant="anna")
        before_entering(state, state.caches.sweep, monkeypatch)
        (again,) = create(state, 1)
        assert state.store.keys() == {state.caches.get(again, tenant="anna").chunk_key}


def test_what_is_created_beside_the_deletion_of_its_last_holder_is_kept(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_state(tmp_path)) as state:
        (one,) = create(state, 1)
        before_entering(state, lambda: state.caches.delete(one, tenant="anna"), monkeypatch)
        (again,) = create(state, 1)
        assert state.store.keys() == {state.caches.get(again, tenant="anna").chunk_key}
        state.caches.delete(again, tenant="anna")
        assert not state.store.keys()


def test_what_could_not_be_entered_goes(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(open_state(tmp_path)) as state:

        def fail() -> None:
            assert state.store.keys()
            raise StoreError("the disk is full")

        before_entering(state, fail, monkeypatch)
        with pytest.raises(StoreError):
            create(state, 1)
        assert not state.store.keys()


def before_entering(
    state: State, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have ``act`` called when the KV of new context caches is stored, before the catalog has
    them."""
    add = state.catalog.add

    def act_first(*arguments: Any, **options: Any) -> Any:
        act()
        return add(*arguments, **options)

    monkeypatch.setattr(state.catalog, "add", act_first)


def test_a_deletion_that_becomes_visible_late(tmp_path: Path, clock: Clock) -> None:
    """Its time is that before the transaction; another process sweeps in between."""
    with closing(open_state(tmp_path)) as one, closing(open_state(tmp_path)) as other:
        (cache_id,) = create(one, 1)
        other.engine.use(one.caches.usable([cache_id], tenant="anna")[cache_id].chunk, "anna")
        before = clock.now
        clock.now += LONGEST_TRANSACTION_SECONDS - 1
        other.caches.sweep()
        assert other.store.keys()
        one.catalog.delete(cache_id, "anna", before)
        other.caches.sweep()
        assert not other.store.keys()


@pytest.mark.parametrize("deleted_after", [-86_400.0, 86_400.0], ids=["set back", "set forward"])
def test_a_deletion_is_followed_though_the_clock_jumps(
    tmp_path: Path, clock: Clock, deleted_after: float
) -> None:
    with closing(open_state(tmp_path)) as one, closing(open_state(tmp_path)) as other:
        before, after = create(one, 1, 2)
        for cache in one.caches.usable([before, after], tenant="anna").values():
            other.engine.use(cache.chunk, "anna")
        other.caches.sweep()
        one.caches.delete(before, tenant="anna")
        clock.now += deleted_after
        one.caches.delete(after, tenant="anna")
        other.caches.sweep()
        assert not other.store.keys()


def test_implicit_context_caches_do_not_outlive_others_since_the_clock_was_set_back(
    tmp_path: Path, clock: Clock
) -> None:
    """While the server runs, or between two runs."""
    with closing(open_state(tmp_path)) as running:
        running.caches.creation.enter_implicit({chunk_of(1): 60.0}, owner="anna", kept=())
        clock.now -= 86_400.0
        running.caches.sweep()
        (old,) = running.caches.list(tenant="anna").items
        assert old.expires_at == clock.now + 60.0
        running.caches.creation.enter_implicit({chunk_of(2): 60.0}, owner="anna", kept=())
        clock.now -= 86_400.0
    with closing(open_state(tmp_path)) as restarted:
        assert {cache.expires_at for cache in restarted.caches.list(tenant="anna").items} == {
            clock.now + 60.0
        }
        clock.now += 61.0
        restarted.caches.sweep()
        assert restarted.caches.list(tenant="anna").items == ()


def test_pages_go_on_though_the_clock_jumps(tmp_path: Path, clock: Clock) -> None:
    with closing(open_state(tmp_path)) as state:
        throughout, seen = [], []
        for jump in (0.0, 86_400.0, -2 * 86_400.0, 86_400.0):
            clock.now += jump
            throughout += create(state, *range(5))
        page = state.caches.list(tenant="anna", limit=3)
        while page.has_more:
            seen += [cache.id for cache in page.items]
            clock.now -= 3600.0
            create(state, 6)
            state.caches.sweep()
            page = state.caches.list(tenant="anna", limit=3, after=seen[-1])
        seen += [cache.id for cache in page.items]
        assert len(seen) == len(set(seen))
        assert set(seen) >= set(throughout)


def test_expired_context_caches_make_room_though_others_hold_their_chunk(
    tmp_path: Path, clock: Clock
) -> None:
    with closing(open_state(tmp_path, quotas=Quotas(Quota(caches=2)))) as state:
        create(state, 1)
        create(state, 1, expires_at=clock.now + 1)
        clock.now += 2
        create(state, 1)
        assert len(state.caches.list(tenant="anna").items) == 2
