"""The cost of background writes to a request that runs beside them."""

from __future__ import annotations

import itertools
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.quality.bench.harness.measurement import TENANT, Workload
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.ttft import SPARE_SLOTS, policy_measurement
from kvlinker.store import ChunkKV, ChunkStore
from kvlinker_lab.store.rows import store_row

CHUNKS_ON_DISK = 16
"""Room on disk, in chunks: older ones are evicted all the time, as in a store that is full."""


def writing_rows(
    subject: MeasuredModel,
    workload: Workload,
    policies: Sequence[str],
    *,
    repeat: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Prompts from host memory, with and without new chunks being written to disk all the while, in
    turn; medians."""
    prompt = workload.prompt(subject.loaded.model.config.vocab_size)
    chunk_bytes = workload.chunk_tokens * subject.loaded.kv_bytes_per_token
    rows: list[Row] = []
    with subject.llm(
        kv_slots=len(prompt) + SPARE_SLOTS,
        disk_space=CHUNKS_ON_DISK * chunk_bytes,
    ) as llm:
        engine = llm.engine
        assert isinstance(engine, EmbeddedEngine)
        for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
            future.result()
        llm.store.flush()
        kv = llm.store.get_computed(
            chunk_key(prompt.chunks[0], fingerprint=engine.fingerprint, tenant=TENANT)
        )
        assert kv is not None
        for policy in policies:
            measure = policy_measurement(engine, prompt, policy)
            idle, busy = [], []
            for turn in range(repeat + 1):
                progress(f"writing beside {policy}, turn {turn} of {repeat}")
                quiet = measure()
                with _writes(llm.store, kv) as written:
                    beside = measure()
                if turn:
                    idle.append(quiet)
                    busy.append(beside)
            alone, together = statistics.median(idle), statistics.median(busy)
            rows.append(
                store_row(
                    "host",
                    "time to first token, beside writes",
                    together,
                    policy=policy,
                    nbytes=written(),
                    host=alone,
                    beside=("without writes", alone),
                )
            )
    return rows


@contextmanager
def _writes(store: ChunkStore, kv: ChunkKV) -> Iterator[Callable[[], int]]:
    """Keep the disk's writer busy with the same KV under ever new keys; tells how many bytes were
    written so far."""
    ended = threading.Event()
    keys: list[str] = []

    def write() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            keys.append(sha256(f"{id(keys)} {number}".encode()).hexdigest())
            store.put(keys[-1], kv)
            store.flush()

    writer = threading.Thread(target=write, name="kvlinker-bench-writes")
    writer.start()
    try:
        yield lambda: len(keys) * kv.nbytes
    finally:
        ended.set()
        writer.join()
        for key in keys:
            store.delete(key)
