"""Context caches as a whole against a model: two processes' worth of catalog and store on one state
directory, over Redis and an object store, with quotas, pins, times to live and damage.

What is listed always answers, accounts are the sums, pinned KV stays, deleted KV is gone from every
tier, and tenants never see what others have.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvlinker.base.errors import (
    ContextCacheNotFoundError,
    PermissionDeniedError,
    PinLimitError,
    QuotaExceededError,
)
from kvlinker.base.types.chunks import chunk_key
from kvlinker.base.types.tenants import SHARED_TENANT, Quota, Quotas, Scope
from kvlinker.service.context_caches import ContextCaches
from kvlinker.store.format.chunk_file import read_chunk_file
from kvlinker.store.format.header import ChunkFileError
from tests.properties import examples
from tests.redis_server import RedisServer
from tests.store.crash_work import (
    CLOCKED,
    DISK_BYTES,
    TENANTS,
    NumberEngine,
    Shared,
    State,
    check,
    chunk_of,
    kv_of,
    open_state,
)
from tests.store.store_chunks import same_kv

OWNERS = (*TENANTS, SHARED_TENANT)
PINNABLE_BYTES = DISK_BYTES // 2
QUOTAS = (
    Quota(),
    Quota(caches=3),
    Quota(bytes=4 * 80 * 70),
    Quota(caches=6, pinned_bytes=2 * 80 * 70),
)
CONTENTS = 10
"""The disk has room for some seven."""

INSTANCES = st.integers(0, 1)
PICKS = st.integers(0, 1000)


@dataclass(frozen=True)
class Held:
    """What the model knows of a context cache."""

    owner: str
    number: int
    expires_at: float | None
    pinned: bool
    batch: str

    @property
    def key(self) -> str:
        chunk = replace(chunk_of(self.number), shared=self.owner == SHARED_TENANT)
        return chunk_key(chunk, fingerprint=NumberEngine.fingerprint, tenant=self.owner)

    @property
    def nbytes(self) -> int:
        return len(chunk_of(self.number)) * NumberEngine.kv_bytes_per_token


class CachesMachine(RuleBasedStateMachine):
    redis: RedisServer | None = None
    states: list[State]

    @initialize(quota=st.sampled_from(QUOTAS))
    def begin(self, quota: Quota) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.now = time.time()
        self.patches: list[Any] = [
            mock.patch("os.fsync"),
            *(mock.patch(f"{module}.time", self) for module in CLOCKED),
        ]
        for patch in self.patches:
            patch.start()
        if self.redis is not None:
            self.redis.client.flushall()
        self.shared = Shared(
            None if self.redis is None else self.redis.url, f"file://{self.folder}/objects"
        )
        self.quotas = {owner: Quota() for owner in OWNERS} | {TENANTS[0]: quota}
        self.held: dict[str, Held] = {}
        self.kept: set[str] = set()  # keys that have been pinned ever since they were seen on disk
        self.states = [self.opened(), self.opened()]
        self.settle()

    def time(self) -> float:
        """The clock of context caches."""
        self.now += 0.001
        return self.now

    def opened(self) -> State:
        return open_state(self.folder, self.shared, Quotas(own=dict(self.quotas)))

    # what is done

    @rule(
        instance=INSTANCES,
        owner=st.sampled_from(OWNERS),
        numbers=st.lists(st.integers(0, CONTENTS - 1), min_size=1, max_size=4),
        seconds=st.sampled_from([None, None, 5.0, 50.0]),
        pinned=st.sampled_from([True, False, False]),
        batch=st.sampled_from("xyz"),
    )
    def create(
        self,
        instance: int,
        owner: str,
        numbers: list[int],
        seconds: float | None,
        pinned: bool,
        batch: str,
    ) -> None:
        expires_at = None if seconds is None else self.now + seconds
        new = [Held(owner, number, expires_at, pinned, batch) for number in numbers]
        expected = self.refusal(list(self.held.values()), new)
        if expected is not None and len(self.live()) < len(self.held):
            expected = self.refusal(list(self.live().values()), new)
        with self.refused(expected):
            created = self.states[instance].caches.create(
                [str(number) for number in numbers],
                tenant="root" if owner == SHARED_TENANT else owner,
                expires_at=expires_at,
                metadata={"batch": batch},
                pinned=pinned,
                scope=Scope.SHARED if owner == SHARED_TENANT else Scope.PRIVATE,
                admin=owner == SHARED_TENANT,
            )
            self.held |= {cache.id: held for cache, held in zip(created.result(), new, strict=True)}
        self.settle()

    @precondition(lambda self: self.live())
    @rule(instance=INSTANCES, pick=PICKS)
    def use(self, instance: int, pick: int) -> None:
        cache_id, held = self.picked(pick)
        state = self.states[instance]
        for tenant in TENANTS if held.owner == SHARED_TENANT else [held.owner]:
            chunk = state.caches.usable([cache_id], tenant=tenant)[cache_id].chunk
            assert same_kv(state.engine.use(chunk, tenant), kv_of(chunk_of(held.number)))
        self.no_use_to_others(state.caches, cache_id, held)
        self.settle()

    def no_use_to_others(self, caches: ContextCaches, cache_id: str, held: Held) -> None:
        shared = held.owner == SHARED_TENANT
        for tenant in set(TENANTS) - {held.owner}:
            for attempt in (
                lambda tenant=tenant: caches.usable([cache_id], tenant=tenant)[cache_id].chunk,
                lambda tenant=tenant: caches.update(cache_id, tenant=tenant, name="mine"),
                lambda tenant=tenant: caches.delete(cache_id, tenant=tenant),
            ):
                try:
                    attempt()
                    assert shared, "another's context cache was found"
                except ContextCacheNotFoundError:
                    assert not shared
                except PermissionDeniedError:
                    assert shared

    @precondition(lambda self: self.live())
    @rule(instance=INSTANCES, pick=PICKS, pinned=st.booleans())
    def pin(self, instance: int, pick: int, pinned: bool) -> None:
        cache_id, held = self.picked(pick)
        after = replace(held, pinned=pinned)
        too_many = pinned and self.pins_exceed(
            list(self.held.values()), [*self.held.values(), after], held.owner
        )
        with self.refused(PinLimitError if too_many else None):
            self.states[instance].caches.update(
                cache_id, tenant=held.owner, pinned=pinned, admin=True
            )
            self.held[cache_id] = after
        self.settle()

    @precondition(lambda self: self.live())
    @rule(
        instance=INSTANCES,
        pick=PICKS,
        seconds=st.sampled_from([None, 3.0]),
        batch=st.sampled_from("xy"),
    )
    def change(self, instance: int, pick: int, seconds: float | None, batch: str) -> None:
        cache_id, held = self.picked(pick)
        expires_at = None if seconds is None else self.now + seconds
        self.states[instance].caches.update(
            cache_id,
            tenant=held.owner,
            expires_at=expires_at,
            metadata={"batch": batch},
            admin=True,
        )
        self.held[cache_id] = replace(held, expires_at=expires_at, batch=batch)
        self.settle()

    @precondition(lambda self: self.live())
    @rule(instance=INSTANCES, pick=PICKS)
    def delete(self, instance: int, pick: int) -> None:
        cache_id, held = self.picked(pick)
        self.states[instance].caches.delete(cache_id, tenant=held.owner, admin=True)
        del self.held[cache_id]
        self.settle()

    @rule(instance=INSTANCES, owner=st.sampled_from(OWNERS), batch=st.sampled_from("xyz"))
    def delete_matching(self, instance: int, owner: str, batch: str) -> None:
        scope = Scope.SHARED if owner == SHARED_TENANT else Scope.PRIVATE
        gone = [
            cache_id
            for cache_id, held in self.live().items()
            if (held.owner, held.batch) == (owner, batch)
        ]
        deleted = self.states[instance].caches.delete_matching(
            {"batch": batch}, tenant=owner, scope=scope, admin=True
        )
        assert deleted == len(gone)
        for cache_id in gone:
            del self.held[cache_id]
        self.settle()

    @rule(seconds=st.sampled_from([1.0, 2.0, 10.0, 700.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        pick=PICKS,
        harm=st.sampled_from(["flip", "truncate", "delete"]),
        place=st.sampled_from(["chunks", "objects"]),
    )
    def damage(self, pick: int, harm: str, place: str) -> None:
        files = sorted(self.folder.glob(f"{place}/??/*.safetensors"))
        if not files:
            return
        path = files[pick % len(files)]
        content = bytearray(path.read_bytes())
        if place == "chunks":
            self.kept.discard(path.stem)
        if harm == "delete":
            path.unlink()
        elif harm == "truncate":
            path.write_bytes(content[: pick % len(content)])
        else:
            content[pick % len(content)] ^= 1
            path.write_bytes(content)

    @rule()
    def repair(self) -> None:
        """Beside the two."""
        check(self.folder, "--repair", shared=self.shared)
        self.settle()
        result = check(self.folder, shared=self.shared)
        assert result.exit_code == 0, result.output

    @rule(instance=INSTANCES)
    def reopen(self, instance: int) -> None:
        self.states[instance].close()
        self.states[instance] = self.opened()
        self.settle()

    @rule(owner=st.sampled_from(OWNERS), quota=st.sampled_from(QUOTAS))
    def change_a_quota(self, owner: str, quota: Quota) -> None:
        self.quotas[owner] = quota
        for instance in (0, 1):
            self.reopen(instance)

    # what is expected

    def live(self) -> dict[str, Held]:
        if not hasattr(self, "states"):
            return {}
        return {
            cache_id: held
            for cache_id, held in self.held.items()
            if held.expires_at is None or held.expires_at > self.now + 0.1
        }

    def picked(self, pick: int) -> tuple[str, Held]:
        live = list(self.live().items())
        return live[pick % len(live)]

    def refusal(self, before: list[Held], new: list[Held]) -> type[Exception] | None:
        """What recording these beside those would exceed."""
        owner = new[0].owner
        quota = self.quotas[owner]
        had, has = (account(owner, records) for records in (before, [*before, *new]))
        if quota.caches is not None and has[0] > quota.caches:
            return QuotaExceededError
        if quota.bytes is not None and has[2] > quota.bytes and has[2] > had[2]:
            return QuotaExceededError
        if new[0].pinned and self.pins_exceed(before, [*before, *new], owner):
            return PinLimitError
        return None

    def pins_exceed(self, before: list[Held], after: list[Held], owner: str) -> bool:
        own_before, own_after = (
            [held for held in records if held.owner == owner] for records in (before, after)
        )
        limits = (
            (before, after, PINNABLE_BYTES),
            (own_before, own_after, self.quotas[owner].pinned_bytes),
        )
        return any(
            limit is not None
            and pinned_bytes(has) > limit
            and pinned_bytes(has) > pinned_bytes(had)
            for had, has, limit in limits
        )

    @contextmanager
    def refused(self, expected: type[Exception] | None):
        if expected is None:
            yield
        else:
            with pytest.raises(expected):
                yield

    def settle(self) -> None:
        """As some seconds later: what waits is written, and every process has swept."""
        for _ in range(2):
            for state in self.states:
                state.store.flush()
                state.caches.sweep()
        self.held = {
            cache_id: held
            for cache_id, held in self.held.items()
            if held.expires_at is None or held.expires_at > self.now
        }
        self.listings_and_accounts_are_right()
        self.nothing_else_is_left()
        pinned = {held.key for held in self.held.values() if held.pinned}
        lying = {path.stem: path for path in self.folder.glob("chunks/??/*.safetensors")}
        assert self.kept & pinned <= lying.keys(), "pinned KV was evicted"
        self.kept = {key for key in pinned & lying.keys() if is_whole(lying[key])}

    def listings_and_accounts_are_right(self) -> None:
        for state in self.states:
            for owner in OWNERS:
                scope = Scope.SHARED if owner == SHARED_TENANT else Scope.PRIVATE
                items = state.caches.list(tenant=owner, scope=scope, limit=1000).items
                assert {
                    item.id: Held(
                        owner,
                        item.chunk.tokens[0],
                        item.expires_at,
                        item.pinned,
                        item.metadata["batch"],
                    )
                    for item in items
                } == {cache_id: held for cache_id, held in self.held.items() if held.owner == owner}
                kept = state.caches.usage(tenant=owner, scope=scope).kept
                assert (kept.caches, kept.chunks, kept.bytes) == account(
                    owner, list(self.held.values())
                )

    def nothing_else_is_left(self) -> None:
        keys = {held.key for held in self.held.values()}
        for state in self.states:
            assert state.store.own_places(limit=sys.maxsize).keys() <= keys, (
                "memory holds what was deleted"
            )
        for place in ("chunks", "objects"):
            assert {path.stem for path in self.folder.glob(f"{place}/??/*")} <= keys, (
                "a deleted chunk's file is left"
            )
        if self.redis is not None:
            names = self.redis.client.keys("*chunk*")
            assert {name.decode().rpartition(":")[2] for name in names} <= keys, (
                "Redis holds what was deleted"
            )

    @precondition(lambda self: hasattr(self, "states"))
    @invariant()
    def budgets_hold(self) -> None:
        for state in self.states:
            for tier in (
                state.store.usage()
            ):  # servers know what the others write to an object store minutes later
                assert tier.used_bytes <= tier.budget_bytes or tier.name == "object"

    def teardown(self) -> None:
        if not hasattr(self, "states"):
            return
        try:
            self.settle()
            for cache_id, held in self.held.items():
                for state in self.states:
                    chunk = state.caches.usable([cache_id], tenant=held.owner)[cache_id].chunk
                    assert same_kv(
                        state.engine.use(chunk, held.owner), kv_of(chunk_of(held.number))
                    )
        finally:
            for state in self.states:
                state.close()
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.folder)


def is_whole(path: Path) -> bool:
    try:
        read_chunk_file(path, path.stem)
    except ChunkFileError:
        return False
    return True


def account(owner: str, records: list[Held]) -> tuple[int, int, int]:
    """Context caches, chunks and bytes of KV of one owner."""
    own = [held for held in records if held.owner == owner]
    chunks = {held.key: held.nbytes for held in own}
    return len(own), len(chunks), sum(chunks.values())


def pinned_bytes(records: list[Held]) -> int:
    return sum({held.key: held.nbytes for held in records if held.pinned}.values())


@pytest.mark.whole
def test_context_caches(request: pytest.FixtureRequest) -> None:
    redis = request.getfixturevalue("redis_server") if shutil.which("redis-server") else None
    run_state_machine_as_test(
        type("Machine", (CachesMachine,), {"redis": redis}),
        settings=examples(20, stateful_step_count=30, deadline=None),
    )
