"""Whatever happens to a Redis: callers see hits and misses, in bounded time, and the tier is used
again afterwards."""

from __future__ import annotations

import http.server
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvlinker.base.events import ChunkDamaged, TierUnavailable
from kvlinker.store import ChunkStore, DiskTier, HostTier
from kvlinker.store.chunk_store import SHARED_TIERS_CLOSE_SECONDS
from kvlinker.store.remote.blob_tier import BlobTier
from kvlinker.store.remote.redis import RedisMedium, redis_tier
from tests.redis_server import MAXMEMORY, RedisServer
from tests.store.cutting_proxy import CuttingProxy
from tests.store.store_chunks import Recorder, chunk_kv, key_of, same_kv
from tests.waiting import wait_until

PLENTY = 1 << 30
TIMEOUT = 1.0
PAUSE = 0.1
PATIENT = 10.0
"""For tests whose Redis answers, or breaks connections, be the machine as busy as it may."""
KV = {number: chunk_kv(number, tokens=30_000) for number in range(6)}  # 2.4 MB: several parts


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_tier(recorder: Recorder) -> Iterator[Callable[..., BlobTier]]:
    tiers = []

    def make(port: int, timeout: float = TIMEOUT) -> BlobTier:
        medium = RedisMedium(
            f"redis://default:hidden@127.0.0.1:{port}/0", prefix="kvlinker", timeout=timeout
        )
        tiers.append(
            BlobTier(
                "redis", medium, recorder.events, answer_seconds=2 * timeout, pause_seconds=PAUSE
            )
        )
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def holds(tier: BlobTier, number: int) -> bool:
    kv = tier.get(key_of(number))
    return kv is not None and same_kv(kv, KV[number])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def every_call(tier: BlobTier) -> None:
    """None raises, none finds anything."""
    assert tier.get(key_of(1)) is None
    assert not tier.put(key_of(2), KV[2])
    assert not tier.contains(key_of(1))
    assert tier.nbytes(key_of(1)) is None
    assert tier.keys() == ()
    assert tier.sizes([key_of(1)]) is None
    assert tier.sizes([]) is None
    assert tier.check().checked == 0
    assert tier.used_bytes >= 0
    assert len(tier) >= 0


def test_a_scan_of_many_keys_may_take_longer_than_an_answer(
    redis_server: RedisServer, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    medium = RedisMedium(redis_server.url, prefix="kvlinker", timeout=PATIENT)
    tier = BlobTier("redis", medium, recorder.events, answer_seconds=TIMEOUT)
    assert tier.put(key_of(1), KV[1])
    scan = medium._names

    def slow_scan(prefix: str) -> Iterator[bytes]:
        time.sleep(1.5 * TIMEOUT)
        return scan(prefix)

    monkeypatch.setattr(medium, "_names", slow_scan)
    assert tier.keys() == (key_of(1),)
    tier.clear()
    assert not redis_server.client.keys("*")
    assert recorder.of(TierUnavailable) == []
    tier.close()


@pytest.mark.parametrize("fault", ["hang", "kill"])
def test_an_outage_costs_one_timeout_and_one_line(
    frail_redis: RedisServer,
    make_tier,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    tier = make_tier(frail_redis.port, timeout=TIMEOUT if fault == "hang" else PATIENT)
    assert tier.put(key_of(1), KV[1])
    used = tier.used_bytes
    getattr(frail_redis, fault)()
    for _ in range(50):
        every_call(tier)
    assert len(recorder.own(TierUnavailable)) == 1
    assert tier.used_bytes == used
    assert len(warnings(caplog)) == 1
    if fault == "hang":
        frail_redis.go_on()
        wait_until(lambda: holds(tier, 1))
    else:
        frail_redis.start()
        wait_until(lambda: tier.put(key_of(1), KV[1]))
        wait_until(lambda: holds(tier, 1))
    assert "answers again" in warnings(caplog)[1]
    assert recorder.of(ChunkDamaged) == []
    assert "hidden" not in caplog.text


def test_a_server_that_is_not_there_at_the_start(frail_redis: RedisServer, make_tier) -> None:
    frail_redis.kill()
    tier = make_tier(frail_redis.port)
    every_call(tier)
    frail_redis.start()
    wait_until(lambda: tier.put(key_of(1), KV[1]))


def test_deletes_during_an_outage_are_done_after_it(frail_redis: RedisServer, make_tier) -> None:
    tier = make_tier(frail_redis.port)
    for number in (1, 2, 3):
        tier.put(key_of(number), KV[number])
    frail_redis.hang()
    tier.delete(key_of(1))
    tier.delete(key_of(2))
    frail_redis.go_on()
    wait_until(lambda: tier.contains(key_of(3)))
    assert not tier.contains(key_of(1))
    assert frail_redis.client.keys("kvlinker:chunk:*") == [f"kvlinker:chunk:{key_of(3)}".encode()]
    assert tier.put(key_of(1), KV[1])
    assert tier.contains(key_of(1))


@pytest.mark.parametrize(
    "harm",
    [
        lambda client, name: client.set(name, b"garbage"),
        lambda client, name: (client.delete(name), client.rpush(name, b"garbage")),
        lambda client, name: client.hset(name, "size", "garbage"),
        lambda client, name: client.hset(name, "size", 1 << 60),
        lambda client, name: client.hset(name, "size", 12),
        lambda client, name: client.hset(name, "0", b"garbage"),
        lambda client, name: client.hset(name, "1", client.hget(name, "1")[:-1]),
        lambda client, name: client.hset(name, "2", client.hget(name, "2")[:-1]),
        lambda client, name: client.hset(name, "2", client.hget(name, "2") + b"?"),
        lambda client, name: client.hset(name, "1", client.hget(name, "1")[:-1] + b"?"),
        lambda client, name: client.hdel(name, "2"),
        lambda client, name: client.hset(name, "7", b"more"),
    ],
)
def test_a_harmed_value_is_damage_and_goes(
    redis_server: RedisServer, make_tier, recorder: Recorder, harm
) -> None:
    tier = make_tier(redis_server.port, timeout=PATIENT)
    tier.put(key_of(1), KV[1])
    harm(redis_server.client, f"kvlinker:chunk:{key_of(1)}")
    found = tier.get(key_of(1))
    if found is not None:  # a byte behind the blob's end, which its size leaves out
        assert same_kv(found, KV[1])
        return
    assert [event.key for event in recorder.of(ChunkDamaged)] == [key_of(1)]
    assert tier.keys() == ()
    assert not redis_server.client.keys("kvlinker:chunk:*")
    assert tier.put(key_of(1), KV[1])
    assert same_kv(tier.get(key_of(1)), KV[1])
    assert recorder.of(TierUnavailable) == []


def test_a_full_redis_that_evicts_nothing_is_still_read(
    redis_server: RedisServer, make_tier, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.client.config_set("maxmemory-policy", "noeviction")
    tier = make_tier(redis_server.port, timeout=PATIENT)
    assert tier.put(key_of(1), KV[1])
    redis_server.client.config_set(
        "maxmemory", redis_server.client.info("memory")["used_memory"] + 100_000
    )
    for number in (2, 3):
        assert not tier.put(key_of(number), KV[number])
    assert tier.keys() == (key_of(1),)
    refusals = [line for line in warnings(caplog) if "does not take chunks for now" in line]
    assert len(refusals) == 1
    assert "maxmemory" in refusals[0]
    assert len(recorder.own(TierUnavailable)) == 2
    assert not redis_server.client.keys("kvlinker:temporary:*")
    assert same_kv(tier.get(key_of(1)), KV[1])

    redis_server.client.config_set("maxmemory", MAXMEMORY)
    assert tier.put(key_of(2), KV[2])


def test_a_read_only_redis_is_still_read(
    redis_server: RedisServer, make_tier, recorder: Recorder
) -> None:
    tier = make_tier(redis_server.port, timeout=PATIENT)
    tier.put(key_of(1), KV[1])
    redis_server.client.execute_command("ACL", "SETUSER", "default", "-hset")
    try:
        assert not tier.put(key_of(2), KV[2])
        assert same_kv(tier.get(key_of(1)), KV[1])
    finally:
        redis_server.client.execute_command("ACL", "SETUSER", "default", "+hset")
    assert recorder.of(TierUnavailable)
    assert tier.put(key_of(2), KV[2])


def test_a_connection_that_is_cut_inside_a_value(
    redis_server: RedisServer,
    make_tier,
    recorder: Recorder,
    caplog: pytest.LogCaptureFixture,
) -> None:
    proxy = CuttingProxy(redis_server.port)
    tier = make_tier(proxy.port, timeout=PATIENT)
    tier.put(key_of(1), KV[1])
    proxy.limit = 1_000_000
    assert tier.get(key_of(1)) is None
    assert (proxy.cuts, len(recorder.own(TierUnavailable)), len(warnings(caplog))) == (1, 1, 1)
    proxy.limit = None
    wait_until(lambda: holds(tier, 1))
    assert recorder.of(ChunkDamaged) == []
    proxy.close()


def test_what_a_server_wrote_until_it_was_killed_does_not_stay(
    redis_server: RedisServer, make_tier
) -> None:
    proxy = CuttingProxy(redis_server.port)
    tier = make_tier(proxy.port)
    assert tier.put(key_of(1), KV[1])
    proxy.before = b"EXPIRE"
    assert not tier.put(key_of(2), KV[2])
    wait_until(lambda: proxy.cuts == 1)
    client = redis_server.client

    def connected() -> set[int]:
        return {int(each["addr"].rpartition(":")[2]) for each in client.client_list()}

    wait_until(lambda: not connected() & proxy.ports)
    assert all(client.ttl(name) > 0 for name in client.keys("kvlinker:temporary:*"))


def test_something_that_is_no_redis(make_tier, recorder: Recorder) -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    tier = make_tier(server.server_port)
    every_call(tier)
    assert recorder.of(TierUnavailable)
    server.shutdown()
    server.server_close()


def test_a_wrong_password_is_no_error_and_stays_hidden(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture, recorder: Recorder
) -> None:
    tier = redis_tier(
        f"redis://nobody:very-secret@127.0.0.1:{redis_server.port}/0", recorder.events
    )
    every_call(tier)
    assert len(warnings(caplog)) == 1
    assert "very-secret" not in caplog.text + repr(recorder.seen)
    tier.close()


def test_a_redis_that_lost_everything_gets_back_what_is_used(
    frail_redis: RedisServer, make_tier, recorder: Recorder, tmp_path: Path
) -> None:
    tier = make_tier(frail_redis.port)
    disk = DiskTier(tmp_path, PLENTY, recorder.events)
    store = ChunkStore([HostTier(0, recorder.events), disk, tier], recorder.events)
    for number in (1, 2):
        store.put(key_of(number), KV[number])
    store.flush()
    frail_redis.kill()
    frail_redis.start()
    assert store.get(key_of(1)) is not None
    store.flush()
    assert tier.keys() == (key_of(1),)
    store.close()


def test_a_hanging_redis_holds_up_neither_disk_nor_answers(
    frail_redis: RedisServer, make_tier, recorder: Recorder, tmp_path: Path
) -> None:
    disk = DiskTier(tmp_path, PLENTY, recorder.events)
    store = ChunkStore(
        [HostTier(PLENTY, recorder.events), disk, make_tier(frail_redis.port)], recorder.events
    )
    store.put(key_of(0), KV[0])
    store.flush()
    frail_redis.hang()
    for number in range(1, 6):
        store.put(key_of(number), KV[number])
    wait_until(lambda: len(disk) == 6)
    assert [store.get("0" * 64) for _ in range(20)] == [None] * 20
    assert len(recorder.own(TierUnavailable)) <= 1, (
        "this thread waited once, or the writer did before it"
    )
    begun = time.monotonic()
    store.close()
    assert time.monotonic() - begun < SHARED_TIERS_CLOSE_SECONDS, (
        "closing waited for what cannot be written"
    )
