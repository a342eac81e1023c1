"""Killed at any moment, a state directory is sound after ``caches check --repair``: nothing lost,
nothing left over.

``KVLINKER_CRASH_POINTS`` sets how often the tests kill; ``KVLINKER_CRASH_SEED`` chooses the
moments.
"""

from __future__ import annotations

import json
import os
import random
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvlinker.base.types.chunks import chunk_key
from kvlinker.llm import LLM
from kvlinker.store import Catalog, StoreError
from kvlinker.store.format.byte_source import BufferSource
from kvlinker.store.format.chunk_file import decode_chunk
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.rekeying import rekey
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.redis_server import RedisServer
from tests.store.crash_work import (
    ALONE,
    DISK_BYTES,
    TENANTS,
    Shared,
    answer,
    change_keys,
    check,
    kv_of,
    open_state,
    repair,
    start,
    work,
)
from tests.store.store_chunks import same_kv

POINTS = int(os.environ.get("KVLINKER_CRASH_POINTS", "15"))
SEED = int(os.environ.get("KVLINKER_CRASH_SEED", "5"))
LONGEST_SECONDS = 0.4
STALE_SECONDS = 600.0

pytestmark = pytest.mark.whole


def run_and_kill(
    target: Callable[[Path, int], None], folder: Path, seed: int, seconds: float, *, steps: int = 0
) -> None:
    """Kill so many seconds after so many steps that it has told of."""
    enough = told(folder)[2] + steps
    process = start(target, folder, seed)
    while told(folder)[2] < enough and process.exitcode is None:
        time.sleep(0.01)
    process.join(seconds)
    assert process.exitcode is None, (
        f"the child with seed {seed} ended by itself: {process.exitcode}"
    )
    process.kill()
    process.join()


@pytest.fixture(scope="module", autouse=True)
def _warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The fork server has imported everything before the first child is killed."""
    folder = tmp_path_factory.mktemp("warm")
    process = start(work, folder, 0)
    deadline = time.monotonic() + 60
    while not (folder / "journal").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.join()


def told(folder: Path) -> tuple[set[str], set[str], int]:
    """Ids whose creation was answered and whose deletion was not begun; ids whose deletion was
    answered; steps."""
    created: set[str] = set()
    deleting: set[str] = set()
    deleted: set[str] = set()
    steps = 0
    journal = folder / "journal"
    for line in journal.read_text().splitlines() if journal.exists() else ():
        kind, value = json.loads(line)
        steps += kind == "step"
        if kind == "created":
            created |= set(value)
        elif kind == "deleting":
            deleting |= set(value)
        elif kind == "deleted":
            deleted |= set(value)
    return created - deleting, deleted, steps


def leave_temporary_files_alone_for_long(folder: Path) -> None:
    for path in [*folder.glob("chunks/??/*.tmp"), *folder.glob("objects/??/*.tmp")]:
        os.utime(path, (time.time() - STALE_SECONDS - 1,) * 2)


def is_sound(folder: Path, shared: Shared = ALONE) -> None:
    """The server starts, ``check`` mends, and then nothing is wrong, lost or left over."""
    with closing(open_state(folder, shared)) as state:
        lying = state.store.keys()
        assert not lying & set(state.catalog.released(float("-inf"), float("inf"))), (
            "a deletion was not finished"
        )
    leave_temporary_files_alone_for_long(folder)
    first = check(folder, "--repair", shared=shared)
    assert first.exit_code in (0, 1), first.output
    assert first.exception is None or isinstance(first.exception, SystemExit), first.output
    second = check(folder, shared=shared)
    assert second.exit_code == 0, f"{first.output}\n{second.output}"
    with closing(open_state(folder, shared)) as state:
        caches = [
            cache
            for tenant in TENANTS
            for cache in state.caches.list(tenant=tenant, limit=10_000).items
        ]
        for cache in caches:
            assert cache.chunk_key == chunk_key(
                cache.chunk, fingerprint=cache.fingerprint, tenant=cache.tenant
            )
            assert same_kv(state.engine.use(cache.chunk, cache.tenant), kv_of(cache.chunk))
        state.store.flush()
        held = state.catalog.chunk_keys().keys()
    ids = {cache.id for cache in caches}
    created, deleted, _ = told(folder)
    assert not created - ids, "a context cache was lost"
    assert not deleted & ids, "a deleted context cache came back"
    for path in folder.glob("chunks/*/*"):
        if path.suffix == ".aside":
            continue
        assert re.fullmatch(r"[0-9a-f]{64}\.safetensors", path.name), path
        assert path.stem in held, path
        assert path.is_file(), path
    assert accounts(
        folder, "SELECT name, caches, chunks, tokens, nbytes FROM tenants WHERE caches OR chunks"
    ) == (
        accounts(
            folder,
            "SELECT tenant, (SELECT count(*) FROM context_caches c WHERE c.tenant = k.tenant),"
            " count(*), sum(length), sum(nbytes) FROM chunks k GROUP BY tenant",
        )
    )


def accounts(folder: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(folder / "catalog.sqlite")) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        return sorted(connection.execute(query).fetchall())


def shared_tiers_are_sound(folder: Path, redis: RedisServer, shared: Shared) -> None:
    """All that lies there is whole, before ``is_sound`` and after it, and the tiers find it."""
    everything_is_whole(folder, redis)
    is_sound(folder, shared)
    everything_is_whole(folder, redis)
    assert not list(folder.glob("objects/??/*.tmp"))
    lying = {name.decode().rpartition(":")[2] for name in redis.client.keys("kvlinker:chunk:*")}
    for tier in shared.tiers():
        with closing(tier):
            keys = tier.keys()
            assert [key for key in keys if tier.contains(key)] == list(keys)
            if tier.name == "redis":
                assert set(keys) == lying
                assert all(tier.get(key) for key in keys)


def everything_is_whole(folder: Path, redis: RedisServer) -> None:
    for path in folder.glob("objects/??/*.safetensors"):
        decode_chunk(BufferSource(np.fromfile(path, dtype=np.uint8)), path.stem)
    for name in redis.client.keys("kvlinker:chunk:*"):
        blob = redis.client.hgetall(name)
        size = int(blob.pop(b"size"))
        assert blob.pop(b"version")
        parts = b"".join(blob[str(number).encode()] for number in range(len(blob)))
        assert len(parts) == size
        decode_chunk(
            BufferSource(np.frombuffer(bytearray(parts), dtype=np.uint8)),
            name.decode().rpartition(":")[2],
        )
    for name in redis.client.keys("kvlinker:temporary:*"):
        assert redis.client.ttl(name) != -1, "it would stay for ever"


def damage(folder: Path, randomness: random.Random) -> None:
    """What no kill does, but disks and people do, to one file of KV."""
    files = sorted(
        path
        for path in folder.glob("chunks/??/*.safetensors")
        if path.is_file() and not path.is_symlink()
    )
    if not files:
        return
    path = randomness.choice(files)
    content = bytearray(path.read_bytes())
    harm = randomness.choice(
        ["truncate", "flip", "delete", "folder", "full folder", "link", "stray"]
    )
    if harm == "truncate":
        path.write_bytes(content[: randomness.randrange(len(content))])
    elif harm == "flip":
        content[randomness.randrange(len(content))] ^= 1 << randomness.randrange(8)
        path.write_bytes(content)
    elif harm == "stray":
        path.with_name(path.stem + "xyz.tmp").write_bytes(content)
    else:
        path.unlink()
        if harm == "link":
            path.symlink_to("/dev/zero")
        elif "folder" in harm:
            path.mkdir()
            if harm == "full folder":
                (path / "file").write_bytes(content)


def test_kills_at_any_moment(tmp_path: Path) -> None:
    randomness = random.Random(SEED)
    for point in range(POINTS):
        steps = 0 if randomness.random() < 0.5 else randomness.randrange(1, 30)
        run_and_kill(
            work,
            tmp_path,
            SEED * 100_000 + point,
            randomness.uniform(0, LONGEST_SECONDS),
            steps=steps,
        )
        if randomness.random() < 0.7:  # else the next process begins where this one was killed
            is_sound(tmp_path)
    is_sound(tmp_path)
    print(f"{POINTS} kills, {told(tmp_path)[2]} steps")
    assert told(tmp_path)[2] > 0


def test_kills_of_one_of_two_processes(tmp_path: Path) -> None:
    """The other one goes on; what either has told of is there, and the disk's budget is that of
    both."""
    randomness = random.Random(SEED + 5)
    beside = partial(work, others=True)
    other = start(beside, tmp_path, SEED * 100_000)
    for point in range(max(5, POINTS // 10)):
        run_and_kill(
            beside,
            tmp_path,
            SEED * 100_000 + point + 1,
            randomness.uniform(0, LONGEST_SECONDS),
            steps=20,
        )
        assert other.exitcode is None
        done = told(tmp_path)[2]
        while told(tmp_path)[2] < done + 20 and other.exitcode is None:
            time.sleep(0.01)
    assert other.exitcode is None
    other.kill()
    other.join()
    is_sound(tmp_path)


def test_kills_with_shared_tiers(tmp_path: Path, redis_server: RedisServer) -> None:
    randomness = random.Random(SEED + 3)
    shared = Shared(redis_server.url, f"file://{tmp_path}/objects")
    worker = partial(work, shared=shared)
    found = [False, False]
    for point in range(max(8, POINTS // 2)):
        steps = 0 if randomness.random() < 0.3 else randomness.randrange(60)
        seconds = randomness.uniform(0, LONGEST_SECONDS)
        run_and_kill(worker, tmp_path, SEED * 200_000 + point, seconds, steps=steps)
        everything_is_whole(tmp_path, redis_server)
        found[0] |= bool(redis_server.client.keys("kvlinker:chunk:*"))
        found[1] |= bool(list(tmp_path.glob("objects/??/*.safetensors")))
        if randomness.random() < 0.7:
            shared_tiers_are_sound(tmp_path, redis_server, shared)
    shared_tiers_are_sound(tmp_path, redis_server, shared)
    assert found == [True, True]
    print(f"{told(tmp_path)[2]} steps")


def test_kills_of_repairs(tmp_path: Path) -> None:
    randomness = random.Random(SEED + 1)
    run_and_kill(work, tmp_path, SEED, 1.0)
    for point in range(max(5, POINTS // 4)):
        run_and_kill(work, tmp_path, SEED * 100_000 + point, 0.2)
        for _ in range(3):
            damage(tmp_path, randomness)
        run_and_kill(repair, tmp_path, 0, randomness.uniform(0, LONGEST_SECONDS / 2))
        is_sound(tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [(bytes(32), bytes(range(32))), (None, bytes(32))],
    ids=["key to key", "none to key"],
)
def test_kills_of_changes_of_the_key(
    tmp_path: Path, first: bytes | None, second: bytes | None
) -> None:
    """Nothing is lost: another change to the second key finishes what was broken off."""
    pytest.importorskip("cryptography")
    randomness = random.Random(SEED + 4)
    old, new = (None if key is None else Cipher(key) for key in (first, second))
    folder = tmp_path / "state"
    with closing(open_state(folder, cipher=old)) as state:
        texts = [str(number) for number in range(6)]
        created = [cache.id for cache in state.caches.create(texts, tenant="anna").result()]
    half_way = 0
    for _ in range(max(5, POINTS // 4)):
        files = {path: path.stat().st_mtime_ns for path in folder.glob("chunks/??/*")}
        assert len(files) == 6
        child = partial(change_keys, first=first, second=second)
        run_and_kill(child, folder, 0, randomness.uniform(0, LONGEST_SECONDS))
        done = rekey(folder / "catalog.sqlite", folder / "chunks", old, new)
        half_way += done.written > 0 < done.finished_before
        assert done.removed == 0
        assert {path: path.stat().st_mtime_ns for path in folder.glob("chunks/??/*")} == files
        with pytest.raises(StoreError, match="encrypted"):
            Catalog(folder / "catalog.sqlite", old or Cipher(b"x" * 32))
        with closing(open_state(folder, cipher=new)) as state:
            assert all(tier.damaged == () for tier in state.store.check())
            assert [
                cache.id for cache in state.caches.list(tenant="anna", order="asc").items
            ] == created
            for cache_id in created:
                cache = state.caches.usable([cache_id], tenant="anna")[cache_id]
                assert same_kv(state.store.get(cache.chunk_key), kv_of(cache.chunk))
    print(f"{half_way} were broken off between files")


def holds_caches(state: Path) -> bool:
    with closing(Catalog(state / "catalog.sqlite")) as catalog:
        return bool(catalog.tenants())


def test_kills_of_a_model(tmp_path: Path) -> None:
    """What is listed after a kill answers as it would have on a new state directory."""
    randomness = random.Random(SEED + 2)
    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0.0}
    points = max(3, POINTS // 20)
    for point in range(10 * points):
        seconds = randomness.uniform(0.5, 2.5) * max(
            1, point / points
        )  # a busy machine takes longer to get anywhere
        run_and_kill(answer, tmp_path / "state", SEED * 100_000 + point, seconds)
        check(tmp_path / "state", "--repair")
        if not (tmp_path / "state").exists():
            continue
        assert check(tmp_path / "state").exit_code == 0
        if point >= points - 1 and holds_caches(tmp_path / "state"):
            break
    with (
        LLM.from_model(
            tiny_model(), tiny_settings(tmp_path / "state", disk_space=DISK_BYTES)
        ) as llm,
        LLM.from_model(tiny_model(), tiny_settings(tmp_path / "new")) as new,
    ):
        caches = {cache.chunk_key: cache for cache in llm.list_caches(limit=1000).items}
        assert caches
        for cache in caches.values():
            text = llm.tokenizer.decode(cache.chunk.tokens)
            (again,) = new.generate_context_cache([text])
            answers = [
                each.chat_completion([{"role": "user", "content": [held]}], **options).token_ids
                for each, held in ((llm, cache), (new, again))
            ]
            assert answers[0] == answers[1], text
