"""The cost of storing many chunks: catalog operations, start-up and memory, whatever the size of
their KV."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from kvlinker.base.events import Events
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.quality.bench.harness.report import Row
from kvlinker.store import Catalog, ContextCache, DiskTier, new_context_cache_id
from kvlinker_lab.store.rows import store_row

TENANT = "bench"
FINGERPRINT = "bench"
TOKENS = 512
"""The tokens of a chunk."""

BATCH = 1000
"""The entries that are written in one transaction."""

TIMES = 200
"""The most look-ups that are timed."""

BUDGET = 1 << 50
"""The tier's budget in bytes, which is never exhausted."""


def crowd_rows(entries: int, *, progress: Callable[[str], None]) -> list[Row]:
    """Measure a catalog and a disk tier with ``entries`` context caches of one chunk each."""
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as name:
        folder = Path(name)
        progress(f"a catalog of {entries} context caches")
        rows = _catalog_rows(folder / "catalog.sqlite", entries)
        progress(f"a folder of {entries} chunk files")
        _make_files(folder / "chunks", entries)
        return rows + _disk_rows(folder / "chunks", entries)


def _catalog_rows(path: Path, entries: int) -> list[Row]:
    catalog = Catalog(path)
    ids = []
    for start in range(0, entries, BATCH):
        records = [_record(number) for number in range(start, min(start + BATCH, entries))]
        catalog.add(records)
        ids += [record.id for record in records]
    catalog.persist()
    some = ids[:: max(1, entries // TIMES)][:TIMES]
    now = time.time()
    operations: dict[str, Callable[[int], object]] = {
        "create": lambda turn: catalog.add([_record(entries + turn)]),
        "find by id": lambda turn: catalog.get(some[turn], TENANT, now),
        "list 20": lambda turn: catalog.list(TENANT, now, limit=20, after=some[turn]),
        "change the time to live": lambda turn: catalog.update(
            some[turn], TENANT, now, expires_at=now + 3600
        ),
        "usage": lambda _: catalog.usage(TENANT),
        "expire": lambda _: catalog.expire(now),
        "delete": lambda turn: catalog.delete(some[turn], TENANT, now),
    }
    rows = [
        store_row("catalog", f"{case}, among {entries}", _median(operation, len(some)))
        for case, operation in operations.items()
    ]
    catalog.close()

    def open_again(_: int) -> None:
        Catalog(path).close()

    return [
        *rows,
        store_row(
            "catalog", f"open, with {entries}", _median(open_again, 5), nbytes=path.stat().st_size
        ),
    ]


def _disk_rows(folder: Path, entries: int) -> list[Row]:
    def start(_: int) -> None:
        DiskTier(folder, BUDGET, Events()).close()

    opened = store_row("disk", f"open, with {entries} chunks", _median(start, 5))
    gc.collect()
    tracemalloc.start()
    tier = DiskTier(folder, BUDGET, Events())
    held = len(tier)
    gc.collect()
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    tier.close()
    return [
        opened,
        store_row("disk", "memory of the index, per chunk", None, nbytes=round(memory / held)),
    ]


def _record(number: int) -> ContextCache:
    chunk = Chunk((number, *range(1, TOKENS)))
    return ContextCache(
        id=new_context_cache_id(),
        tenant=TENANT,
        model="bench",
        name=None,
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint=FINGERPRINT, tenant=TENANT),
        fingerprint=FINGERPRINT,
        created_at=float(number),
        expires_at=None,
        metadata={"number": str(number)},
        pinned=False,
        kv_bytes=TOKENS,
    )


def _make_files(folder: Path, entries: int) -> None:
    """Empty scores, which no reader needs here."""
    for number in range(entries):
        key = sha256(str(number).encode()).hexdigest()
        file = folder / key[:2] / f"{key}.safetensors"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def _median(operation: Callable[[int], object], times: int) -> float:
    """Seconds."""
    taken = []
    for turn in range(times):
        begin = time.perf_counter()
        operation(turn)
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)
