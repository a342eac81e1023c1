"""The Redis tier on a real server, which limits itself and evicts."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest

from kvlinker.base.events import ChunkDamaged, Events, TierUnavailable
from kvlinker.base.installing import install_command
from kvlinker.store import StoreError
from kvlinker.store.chunk_kv import LayerLostError
from kvlinker.store.format.chunk_file import encode_chunk
from kvlinker.store.remote.blob_tier import BlobTier
from kvlinker.store.remote.medium import KEYS_AT_ONCE, MediumRefused
from kvlinker.store.remote.objects import object_tier
from kvlinker.store.remote.redis import PART_BYTES, UNUSED_SECONDS, RedisMedium, redis_tier
from kvlinker.store.tiers.base import UNKNOWN_BUDGET
from tests.redis_server import RedisServer
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv
from tests.store.tiers.test_tiers import KV


def blob_size(number: int) -> int:
    return encode_chunk(key_of(number), KV[number]).nbytes


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def tier(redis_server: RedisServer, recorder: Recorder) -> Iterator[BlobTier]:
    tier = redis_tier(redis_server.url, recorder.events)
    yield tier
    assert recorder.of(TierUnavailable) == []
    tier.close()


@pytest.mark.parametrize("tokens", [1, PART_BYTES // 80, PART_BYTES // 80 + 1, PART_BYTES // 8])
def test_blobs_of_any_number_of_parts_come_back_bit_for_bit(tier: BlobTier, tokens: int) -> None:
    kv = chunk_kv(1, tokens=tokens)
    assert tier.put(key_of(1), kv)
    found = tier.get(key_of(1))
    assert found is not None
    assert same_kv(found, kv)


def test_sizes_take_one_question_for_many_keys(
    redis_server: RedisServer, tier: BlobTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (1, 2):
        tier.put(key_of(number), KV[number])
    redis_server.client.hset(f"kvlinker:chunk:{key_of(3)}", "size", "many")
    redis_server.client.set(f"kvlinker:chunk:{key_of(4)}", "garbage")
    medium = tier._medium
    assert isinstance(medium, RedisMedium)
    client = medium._redis
    questions = mock.Mock(wraps=client.pipeline)
    monkeypatch.setattr(client, "pipeline", questions)
    found = tier.sizes(map(key_of, range(3 * KEYS_AT_ONCE)))
    assert found == {key_of(number): blob_size(number) for number in (1, 2)}
    assert questions.call_args_list == [mock.call(transaction=False)] * 3


def test_ranges_are_the_blobs_bytes(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), chunk_kv(1, tokens=PART_BYTES // 8))
    blob = tier._medium.stat(key_of(1))
    assert blob is not None
    size = blob.nbytes
    assert size > 9 * PART_BYTES
    whole = bytearray(size)
    tier._medium.read_into(key_of(1), blob, 0, memoryview(whole))
    for start, length in (
        (0, 8),
        (PART_BYTES - 1, 2),
        (PART_BYTES, PART_BYTES),
        (size - 3, 3),
        (7, size - 7),
    ):
        part = bytearray(length)
        tier._medium.read_into(key_of(1), blob, start, memoryview(part))
        assert part == whole[start : start + length]


def test_a_second_server_finds_what_the_first_one_put(
    redis_server: RedisServer, tier: BlobTier
) -> None:
    tier.put(key_of(1), KV[1])
    other = redis_tier(redis_server.url, Recorder().events)
    assert other.contains(key_of(1))
    assert same_kv(other.get(key_of(1)), KV[1])
    assert len(other) == len(tier) == 1
    other.delete(key_of(1))
    assert tier.get(key_of(1)) is None
    assert len(tier) == 0


def test_foreign_keys_are_never_touched(redis_server: RedisServer, recorder: Recorder) -> None:
    foreign = {
        b"mine": b"1",
        b"kvlinker": b"2",
        b"kvlinker2:chunk:" + key_of(1).encode(): b"3",
        b"other:uses": b"4",
    }
    for name, value in foreign.items():
        redis_server.client.set(name, value)
    neighbour = redis_tier(redis_server.url, recorder.events, prefix="kv?inker*")
    tier = redis_tier(redis_server.url, recorder.events)
    neighbour.put(key_of(1), KV[1])
    for number in range(6):
        tier.put(key_of(number), KV[number])
    assert set(tier.keys()) == set(map(key_of, range(6)))
    assert tier.check().checked == 6
    for number in range(5):
        tier.delete(key_of(number))
    tier.clear()
    assert same_kv(neighbour.get(key_of(1)), KV[1])
    assert {name: redis_server.client.get(name) for name in foreign} == foreign
    neighbour.delete(key_of(1))
    assert set(redis_server.client.keys("*")) == foreign.keys()


def test_chunks_that_nobody_uses_expire(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), KV[1])
    (name,) = redis_server.client.keys("*")
    assert name.decode() == f"kvlinker:chunk:{key_of(1)}"
    assert redis_server.client.ttl(name) == UNUSED_SECONDS
    redis_server.client.expire(name, 5)
    assert tier.contains(key_of(1))
    assert redis_server.client.ttl(name) <= 5, "a look is not a use"
    assert tier.get(key_of(1)) is not None
    assert redis_server.client.ttl(name) == UNUSED_SECONDS
    redis_server.client.expire(name, 0)
    assert tier.get(key_of(1)) is None
    assert tier.check().checked == 0


def test_a_check_lets_old_chunks_expire(redis_server: RedisServer, tier: BlobTier) -> None:
    for number in (1, 2):
        tier.put(key_of(number), KV[number])
    old, new = (f"kvlinker:chunk:{key_of(number)}" for number in (1, 2))
    redis_server.client.persist(old)
    redis_server.client.expire(new, 500)
    assert tier.check().checked == 2
    assert redis_server.client.ttl(old) == UNUSED_SECONDS
    assert redis_server.client.ttl(new) <= 500, "a check is not a use"


def test_budget_and_usage_are_those_of_redis(redis_server: RedisServer, tier: BlobTier) -> None:
    """All keys and bytes of the server count, whoever wrote them."""
    redis_server.client.config_set("maxmemory", 1 << 26)
    tier.put(key_of(1), KV[1])
    redis_server.client.set("foreign", b"x" * 1_000_000)
    assert tier.used_bytes > 1_000_000 + blob_size(1)
    assert (len(tier), tier.budget_bytes) == (2, 1 << 26)


def test_a_user_without_info_reads_and_writes(
    redis_server: RedisServer,
    tier: BlobTier,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """No limit is known to it, so that no chunk is too large."""
    assert tier.put(key_of(1), KV[1])
    redis_server.client.acl_setuser(
        "app",
        enabled=True,
        passwords=["+secret"],
        keys=["kvlinker:*"],
        commands=["+@all", "-info"],
    )
    try:
        limited = redis_tier(redis_server.url.replace("//", "//app:secret@"), recorder.events)
        assert same_kv(limited.get(key_of(1)), KV[1])
        reader = limited.open(key_of(1))
        assert reader is not None
        reader.close()
        assert limited.put(key_of(2), KV[2])
        assert limited.budget_bytes == UNKNOWN_BUDGET
        assert (limited.used_bytes, len(limited)) == (0, 2)
        limited._medium.open()  # as after an outage
        limited.close()
    finally:
        redis_server.client.acl_deluser("app")
    assert same_kv(tier.get(key_of(2)), KV[2])
    assert recorder.of(ChunkDamaged) == []
    (line,) = (record.getMessage() for record in caplog.records)
    assert "ACL SETUSER <user> +info" in line


def test_a_blob_above_a_lowered_budget_is_a_miss(
    redis_server: RedisServer, tier: BlobTier, recorder: Recorder
) -> None:
    """Redis decides what it keeps."""
    assert tier.put(key_of(1), KV[1])
    redis_server.client.config_set("maxmemory-policy", "noeviction")
    redis_server.client.config_set("maxmemory", blob_size(1) - 1)
    tier._medium.open()
    assert tier.get(key_of(1)) is None
    assert tier.open(key_of(1)) is None
    assert tier.contains(key_of(1))
    assert recorder.of(ChunkDamaged) == []


@pytest.mark.parametrize(
    ("maxmemory", "policy", "warning"),
    [
        (0, "noeviction", "has no maxmemory"),
        (1 << 26, "noeviction", "maxmemory-policy noeviction"),
        (1 << 26, "allkeys-random", "maxmemory-policy allkeys-random"),
        (1 << 26, "volatile-ttl", "maxmemory-policy volatile-ttl"),
        (1 << 26, "allkeys-lru", None),
        (1 << 26, "volatile-lru", None),
        (1 << 26, "volatile-lfu", None),
    ],
)
def test_a_start_warns_where_redis_does_not_limit_itself(
    redis_server: RedisServer,
    caplog: pytest.LogCaptureFixture,
    maxmemory: int,
    policy: str,
    warning: str | None,
) -> None:
    redis_server.client.config_set("maxmemory", maxmemory)
    redis_server.client.config_set("maxmemory-policy", policy)
    tier = redis_tier(redis_server.url, Events())
    assert tier.put(key_of(1), KV[1])
    assert tier.budget_bytes >= maxmemory
    tier._medium.open()  # as after an outage
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (warning is not None)
    assert all(str(warning) in line for line in said)
    tier.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_full_redis_evicts_chunks(
    redis_server: RedisServer, tier: BlobTier, recorder: Recorder, policy: str
) -> None:
    room = redis_server.client.info("memory")["used_memory"] + 6_000_000
    redis_server.client.config_set("maxmemory", room)
    redis_server.client.config_set("maxmemory-policy", policy)
    kv = chunk_kv(1, tokens=12_000)  # 1 MB
    for number in range(20):
        assert tier.put(key_of(number), kv)
    present = [number for number in range(20) if tier.contains(key_of(number))]
    assert 0 < len(present) < 10
    assert all(same_kv(tier.get(key_of(number)), kv) for number in present)
    assert tier.used_bytes <= tier.budget_bytes == room
    assert recorder.of(ChunkDamaged) == []


def test_a_blob_is_not_replaced(redis_server: RedisServer, tier: BlobTier) -> None:
    """Two servers write it at once, and a third may read what came first."""
    other = redis_tier(redis_server.url, Recorder().events)

    def pieces() -> Iterator[memoryview]:
        assert other.put(key_of(1), KV[1])
        redis_server.client.expire(f"kvlinker:chunk:{key_of(1)}", 5)
        yield memoryview(b"other bytes")

    assert tier._medium.write(key_of(1), len(b"other bytes"), pieces()).stored
    assert same_kv(tier.get(key_of(1)), KV[1])
    (name,) = redis_server.client.keys("*")
    assert redis_server.client.ttl(name) == UNUSED_SECONDS
    other.close()


@pytest.mark.parametrize("written_again", [True, False])
def test_a_blob_that_changes_while_it_is_read_is_a_miss(
    redis_server: RedisServer, tier: BlobTier, recorder: Recorder, written_again: bool
) -> None:
    kv = chunk_kv(1, tokens=PART_BYTES // 8, layers=3)
    assert tier.put(key_of(1), kv)
    reader = tier.open(key_of(1))
    assert reader is not None
    tier.delete(key_of(1))
    if written_again:
        assert tier.put(key_of(1), kv)
    with pytest.raises(LayerLostError):
        reader.read(2)
    reader.close()
    assert recorder.of(ChunkDamaged) == []
    assert tier.contains(key_of(1)) is written_again


def test_blobs_of_the_version_before_are_read(redis_server: RedisServer, tier: BlobTier) -> None:
    tier.put(key_of(1), KV[1])
    assert redis_server.client.hdel(f"kvlinker:chunk:{key_of(1)}", "version") == 1
    assert same_kv(tier.get(key_of(1)), KV[1])


def test_a_write_that_breaks_off_leaves_nothing(redis_server: RedisServer, tier: BlobTier) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(9 * PART_BYTES))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tier._medium.write(key_of(1), 10 * PART_BYTES, pieces())
    assert redis_server.client.keys("*") == []


def test_a_chunk_that_is_evicted_while_it_is_written_is_not_stored(
    redis_server: RedisServer, tier: BlobTier
) -> None:
    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(9 * PART_BYTES))
        (temporary,) = redis_server.client.keys("kvlinker:temporary:*")
        redis_server.client.delete(temporary)
        yield memoryview(bytes(PART_BYTES))

    with pytest.raises(MediumRefused, match="evicted"):
        tier._medium.write(key_of(1), 10 * PART_BYTES, pieces())
    assert redis_server.client.keys("*") == []


@pytest.mark.parametrize(
    "url", ["localhost:6379", "http://localhost", "redis://:se/cret@host:1", "redis://x:port"]
)
def test_a_url_that_is_none_is_told_without_its_password(url: str) -> None:
    with pytest.raises(StoreError, match=r"redis://\[user:password@\]host:port") as raised:
        redis_tier(url, Recorder().events)
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
    ("library", "make", "extra"),
    [
        ("redis", partial(redis_tier, "redis://localhost"), "redis"),
        ("fsspec", partial(object_tier, "file:///nowhere", 1), "remote"),
    ],
)
def test_a_missing_library_is_told_with_the_extra_that_brings_it(
    library: str,
    make: partial[BlobTier],
    extra: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its module is imported anew: that, too, works without the library."""
    module = make.func.__module__
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, module)
    imported = getattr(importlib.import_module(module), make.func.__name__)
    with pytest.raises(StoreError, match=re.escape(install_command(extra))):
        imported(*make.args, Events())
