"""Peak memory of one request, beside the KV that it needs in any case. Linux only: it reads /proc."""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from kvlinker.engine.contract import Engine, GenerationEvent, GenerationRequest
from kvlinker.errors import InvalidRequestError
from kvlinker.linking import parse_policy
from kvlinker.prompt.segments import Prompt
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject
from kvlinker.research.bench.ttft import SPARE_SLOTS, TENANT, Workload
from kvlinker.types.answers import Delta
from kvlinker.types.sampling import SamplingParams

COLUMNS = ("policy", "context_tokens", "kv_mb", "peak_mb", "ratio_to_kv")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def run_memory(
    subject: Subject,
    workload: Workload,
    policies: Sequence[str],
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """How far the process's memory rises above what it was just before a request, for each policy.

    A fresh pool's pages count from their first use, so the rise is the request's KV and whatever else it takes.
    """
    if not _CLEAR_REFS.exists():
        raise InvalidRequestError("bench memory needs Linux: there is no /proc/self/clear_refs here.")
    rows: list[Row] = []
    prompt = workload.prompt(subject.loaded.model.config.vocab_size)
    small = Workload(1, workload.chunk_tokens, workload.fresh_tokens).prompt(
        subject.loaded.model.config.vocab_size, seed=1
    )
    kv_bytes = len(prompt) * subject.loaded.kv_bytes_per_token
    for policy in policies:
        progress(policy)
        _return_free_memory()  # else the pool may lie in pages that count already
        with subject.llm(kv_slots=workload.tokens + 2 * SPARE_SLOTS + len(small)) as llm:
            for chunk in (*prompt.chunks, *small.chunks):
                llm.engine.cache_chunk(chunk, tenant=TENANT).result()
            llm.store.flush()
            _answer(llm.engine, small, policy)  # what any first request allocates once
            before = _return_free_memory()
            _CLEAR_REFS.write_text(_RESET_PEAK)
            _answer(llm.engine, prompt, policy)
            touched_before = len(small) * subject.loaded.kv_bytes_per_token  # the same slots of the pool
            peak = _peak_bytes() - before + touched_before
        rows.append(
            {
                "policy": policy,
                "context_tokens": len(prompt),
                "kv_mb": kv_bytes / 1e6,
                "peak_mb": peak / 1e6,
                "ratio_to_kv": peak / kv_bytes,
            }
        )
    return subject.report(rows)


def _answer(engine: Engine, prompt: Prompt, policy: str) -> None:
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    params = SamplingParams(temperature=0, max_tokens=1)
    engine.generate(GenerationRequest(prompt, parse_policy(policy), params, TENANT), events.put)
    while isinstance(events.get(), Delta):
        pass


def _return_free_memory() -> int:
    """Give freed memory back to the system, so that it cannot hide what comes next; resident bytes after that."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def _peak_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
