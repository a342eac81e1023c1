"""The Redis tier on a real server: a tier like the others, with accounting that all servers
share."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from pydantic import ByteSize

from kvlinker.base.events import ChunkDamaged, ChunkEvicted, Events, TierUnavailable
from kvlinker.base.installing import install_command
from kvlinker.store import StoreError
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.tiers import BlobTier, object_tier, redis_tier
from kvlinker.store.tiers.medium import KEYS_AT_ONCE
from kvlinker.store.tiers.redis import PART_BYTES, RedisMedium
from kvlinker.store.tiers.redis_scripts import BEGIN
from tests.properties import examples
from tests.redis_server import RedisServer
from tests.store.store_chunks import Recorder, chunk_kv, key_of, run_threads, same_kv
from tests.store.tiers.test_tiers import KV, TierMachine

PLENTY = 1 << 30


def blob_size(number: int) -> int:
    return encode_chunk(key_of(number), KV[number]).nbytes


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tier(redis_server: RedisServer, recorder: Recorder) -> Iterator[BlobTier]:
    tier = redis_tier(redis_server.url, PLENTY, recorder.events)
    yield tier
    assert recorder.of(TierUnavailable) == []
    tier.close()


def test_a_budget_from_the_settings_is_one_that_every_parser_packs(
    redis_server: RedisServer,
) -> None:
    """hiredis, where it is installed, refuses subclasses of int."""
    medium = RedisMedium(redis_server.url, ByteSize(1 << 20), prefix="kvlinker", timeout=1.0)
    assert type(medium.budget_bytes) is int
    assert medium.open() == ()
    medium.close()


@pytest.mark.whole
def test_any_sequence_of_calls_is_a_least_recently_used_cache(running_redis: RedisServer) -> None:
    class RedisMachine(TierMachine):
        @initialize(budget=st.integers(0, 9000))
        def open(self, budget: int) -> None:
            running_redis.client.flushall()
            self.tier = redis_tier(running_redis.url, budget, self.recorder.events)

        def size(self, number: int) -> int:
            return blob_size(number)

        @rule()
        def another_server(self) -> None:
            self.tier.close()
            self.tier = redis_tier(running_redis.url, self.tier.budget_bytes, self.recorder.events)

        @precondition(lambda self: self.model)
        @rule()
        def another_server_with_half_the_budget(self) -> None:
            budget = self.tier.budget_bytes // 2
            self.tier.close()
            self.tier = redis_tier(running_redis.url, budget, self.recorder.events)
            while sum(self.model.values()) > budget:
                self.evicted.append(self.model.popitem(last=False)[1])

        @invariant()
        def redis_holds_what_is_counted(self) -> None:
            if hasattr(self, "tier"):
                names = {
                    name.decode().rpartition(":")[2]
                    for name in running_redis.client.keys("kvlinker:chunk:*")
                }
                assert names == {key_of(number) for number in self.model}
                assert not running_redis.client.keys("kvlinker:temporary:*")
                assert self.recorder.of(TierUnavailable) == []

        def teardown(self) -> None:
            if hasattr(self, "tier"):
                self.tier.close()

    case = RedisMachine.TestCase
    case.settings = examples(20, core=10, stateful_step_count=20, deadline=None)
    case().runTest()


@pytest.mark.parametrize("tokens", [1, PART_BYTES // 80, PART_BYTES // 80 + 1, PART_BYTES // 8])
def test_blobs_of_any_number_of_parts_come_back_bit_for_bit(tier: BlobTier, tokens: int) -> None:
    kv = chunk_kv(1, tokens=tokens)
    assert tier.put(key_of(1), kv)
    found = tier.get(key_of(1))
    assert found is not None
    assert same_kv(found, kv)


def test_sizes_take_one_question_for_many_keys(redis_server: RedisServer, tier: BlobTier) -> None:
    for number in (1, 2):
        tier.put(key_of(number), KV[number])
    tier._medium.sizes([key_of(1)])  # loads the script
    before = redis_server.client.info("stats")["total_commands_processed"]
    found = tier.sizes(map(key_of, range(3 * KEYS_AT_ONCE)))
    asked = redis_server.client.info("stats")["total_commands_processed"] - before
    assert found == {key_of(number): blob_size(number) for number in (1, 2)}
    assert asked <= 2 * 3 + 1, (
        "a script and what it calls, for each batch, and the question of how many"
    )


def test_sizes_that_are_none_are_left_out(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), KV[1])
    redis_server.client.hset("kvlinker:sizes", key_of(2), "many")
    assert tier.sizes([key_of(1), key_of(2)]) == {key_of(1): blob_size(1)}
    redis_server.client.set("kvlinker:sizes", "garbage")
    assert tier.sizes([key_of(1)]) == {key_of(1): blob_size(1)}, "mended on the way"


def test_ranges_are_the_blobs_bytes(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), chunk_kv(1, tokens=PART_BYTES // 8))
    size = tier.nbytes(key_of(1))
    assert size is not None
    assert size > 9 * PART_BYTES
    whole = bytearray(size)
    tier._medium.read_into(key_of(1), 0, memoryview(whole))
    for start, length in (
        (0, 8),
        (PART_BYTES - 1, 2),
        (PART_BYTES, PART_BYTES),
        (size - 3, 3),
        (7, size - 7),
    ):
        part = bytearray(length)
        tier._medium.read_into(key_of(1), start, memoryview(part))
        assert part == whole[start : start + length]


def test_a_second_server_finds_what_the_first_one_put(
    redis_server: RedisServer, tier: BlobTier
) -> None:
    tier.put(key_of(1), KV[1])
    other = redis_tier(redis_server.url, PLENTY, Recorder().events)
    assert other.contains(key_of(1))
    assert same_kv(other.get(key_of(1)), KV[1])
    assert (other.used_bytes, len(other)) == (tier.used_bytes, len(tier)) == (blob_size(1), 1)
    other.delete(key_of(1))
    assert tier.get(key_of(1)) is None
    assert tier.used_bytes == 0


def test_foreign_keys_are_never_touched(redis_server: RedisServer, recorder: Recorder) -> None:
    foreign = {
        b"mine": b"1",
        b"kvlinker": b"2",
        b"kvlinker2:chunk:" + key_of(1).encode(): b"3",
        b"other:uses": b"4",
    }
    for name, value in foreign.items():
        redis_server.client.set(name, value)
    neighbour = redis_tier(redis_server.url, PLENTY, recorder.events, prefix="kv?inker*")
    tier = redis_tier(redis_server.url, 2 * blob_size(5), recorder.events)
    neighbour.put(key_of(1), KV[1])
    for number in range(6):
        tier.put(key_of(number), KV[number])
    for number in range(6):
        tier.delete(key_of(number))
    tier.check()
    assert (neighbour.used_bytes, tier.used_bytes) == (blob_size(1), 0)
    assert same_kv(neighbour.get(key_of(1)), KV[1])
    assert {name: redis_server.client.get(name) for name in foreign} == foreign
    neighbour.delete(key_of(1))
    left = set(redis_server.client.keys("*")) - foreign.keys()
    assert left == {b"kvlinker:totals", b"kv?inker*:totals"}


def test_nothing_readable_lies_beside_the_kv(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), KV[1])
    names = {name.decode() for name in redis_server.client.keys("*")}
    assert names == {
        f"kvlinker:{name}" for name in ("uses", "sizes", "totals", f"chunk:{key_of(1)}")
    }
    assert redis_server.client.zrange("kvlinker:uses", 0, -1) == [key_of(1).encode()]


def test_the_budget_holds_with_several_servers_at_once(
    redis_server: RedisServer, recorder: Recorder
) -> None:
    budget = 3 * blob_size(5)
    tiers = [redis_tier(redis_server.url, budget, recorder.events) for _ in range(3)]
    over = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            if (used := tiers[0].used_bytes) > budget:
                over.append(used)

    def work(tier: BlobTier, seed: int) -> None:
        for turn in range(60):
            number = (turn * 7 + seed * 3) % 6
            tier.put(key_of(number), KV[number])
            if (kv := tier.get(key_of((number + turn) % 6))) is not None:
                assert same_kv(kv, KV[(number + turn) % 6])
            if turn % 5 == seed:
                tier.delete(key_of(number))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        run_threads(
            *(lambda tier=tier, seed=seed: work(tier, seed) for seed, tier in enumerate(tiers))
        )
    finally:
        done.set()
        watching.join()
    assert over == []
    assert recorder.of(ChunkEvicted)
    assert [*recorder.of(ChunkDamaged), *recorder.of(TierUnavailable)] == []
    client = redis_server.client
    names = {name.rpartition(b":")[2] for name in client.keys("kvlinker:chunk:*")}
    assert (
        names == set(client.zrange("kvlinker:uses", 0, -1)) == set(client.hkeys("kvlinker:sizes"))
    )
    assert tiers[0].used_bytes == sum(map(int, client.hvals("kvlinker:sizes")))
    assert not client.keys("kvlinker:temporary:*")


def test_what_redis_evicted_by_itself_is_a_miss_and_check_sets_the_account_right(
    redis_server: RedisServer, tier: BlobTier, recorder: Recorder
) -> None:
    for number in (1, 2, 3):
        tier.put(key_of(number), KV[number])
    redis_server.client.delete(f"kvlinker:chunk:{key_of(1)}")
    assert tier.get(key_of(1)) is None
    assert tier.check().checked == 2
    assert (len(tier), tier.used_bytes) == (2, blob_size(2) + blob_size(3))
    redis_server.client.delete("kvlinker:uses", "kvlinker:sizes", "kvlinker:totals")
    assert same_kv(tier.get(key_of(2)), KV[2])
    assert tier.keys() == (key_of(2),)
    assert tier.check().checked == 2
    assert (set(tier.keys()), tier.used_bytes) == (
        {key_of(2), key_of(3)},
        blob_size(2) + blob_size(3),
    )
    assert recorder.of(ChunkDamaged) == []


def test_a_write_that_breaks_off_leaves_nothing(redis_server: RedisServer, tier: BlobTier) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(9 * PART_BYTES))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier._medium.write(key_of(1), 10 * PART_BYTES, pieces())
    assert (tier.used_bytes, len(tier)) == (0, 0)
    assert redis_server.client.keys("*") == [b"kvlinker:totals"]


def test_what_a_crash_leaves_is_found_by_check_and_may_be_written_again(
    redis_server: RedisServer, tier: BlobTier
) -> None:
    """A server died between taking the room for a blob and putting it in its place."""
    medium: Any = tier._medium
    for number in (1, 2):
        medium._run(BEGIN, key_of(number), 5000, PLENTY)
    assert tier.get(key_of(1)) is None
    assert tier.put(key_of(1), KV[1])
    assert tier.check().checked == 1
    assert (tier.keys(), tier.used_bytes) == ((key_of(1),), blob_size(1))


def test_a_delete_during_a_write_wins(tier: BlobTier, redis_server: RedisServer) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(100))
        tier.delete(key_of(1))
        yield memoryview(bytes(100))

    assert not tier._medium.write(key_of(1), 200, pieces()).stored
    assert redis_server.client.keys("*") == [b"kvlinker:totals"]


@pytest.mark.parametrize("name", ["uses", "sizes", "totals"])
@pytest.mark.parametrize("action", ["get", "put", "delete", "usage", "check"])
def test_overwritten_accounting_mends_itself(
    redis_server: RedisServer, tier: BlobTier, name: str, action: str, recorder: Recorder
) -> None:
    tier.put(key_of(1), KV[1])
    tier.put(key_of(2), KV[2])
    redis_server.client.set(f"kvlinker:{name}", "garbage")
    match action:
        case "get":
            assert same_kv(tier.get(key_of(1)), KV[1])
            tier.put(key_of(3), KV[3])
        case "put":
            assert tier.put(key_of(3), KV[3])
        case "delete":
            tier.delete(key_of(1))
            tier.put(key_of(3), KV[3])
        case "usage":
            assert len(tier) == 2
        case "check":
            assert tier.check().checked == 2
    present = {number for number in (1, 2, 3) if tier.contains(key_of(number))}
    assert present == {"get": {1, 2, 3}, "put": {1, 2, 3}, "delete": {2, 3}}.get(action, {1, 2})
    assert set(tier.keys()) == {key_of(number) for number in present}
    assert tier.used_bytes == sum(map(blob_size, present))


def test_garbage_in_the_account_mends_itself(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), KV[1])
    redis_server.client.hset("kvlinker:totals", mapping={"bytes": "many", "clock": "late"})
    assert (tier.used_bytes, len(tier)) == (blob_size(1), 1)
    redis_server.client.zadd("kvlinker:uses", {"garbage": 1, b"\xff\xfe": 2})
    redis_server.client.hset("kvlinker:sizes", key_of(1), "large")
    assert tier.keys() == (key_of(1),)
    tier.check()
    assert (tier.used_bytes, len(tier)) == (blob_size(1), 1)


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://localhost", "redis://:se/cret@host:1", "redis://x:port"]
)
def test_a_url_that_is_none_is_told_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"redis://\[user:password@\]host:port") as raised:
        redis_tier(url, PLENTY, Recorder().events)
    assert "cret" not in str(raised.value)


def test_caller_mistakes_are_told(tier: BlobTier) -> None:
    for call in (
        tier.get,
        tier.contains,
        tier.delete,
        tier.nbytes,
        lambda key: tier.put(key, KV[1]),
    ):
        with pytest.raises(ValueError, match="not a chunk key"):
            call("../etc")


@pytest.mark.parametrize(
    ("library", "module", "make", "extra"),
    [
        ("redis", "redis", partial(redis_tier, "redis://localhost"), "redis"),
        ("fsspec", "object", partial(object_tier, "file:///nowhere"), "remote"),
    ],
)
def test_a_missing_library_is_told_with_the_extra_that_brings_it(
    library: str,
    module: str,
    make: Callable[..., BlobTier],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"kvlinker.store.tiers.{module}", raising=False)
    with pytest.raises(StoreError, match=re.escape(install_command(extra))):
        make(1, Events())
