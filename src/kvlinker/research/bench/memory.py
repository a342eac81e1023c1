"""Measures the peak memory of one request, beside the KV that it needs in any case. Linux only: it reads /proc."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from kvlinker.errors import InvalidRequestError
from kvlinker.research.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Policies,
    Setup,
    benchmark,
    policy_names,
)
from kvlinker.research.bench.harness.measurement import Workload, cache_chunks, first_token, peak_memory
from kvlinker.research.bench.harness.report import Report, Row
from kvlinker.research.bench.harness.subject import Subject
from kvlinker.research.progress import Progress, silent

COLUMNS = ("policy", "context_tokens", "kv_mb", "peak_mb", "ratio_to_kv")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SPARE_SLOTS = 2048


@benchmark("memory")
def memory(
    setup: Setup,
    *,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,full",
) -> Report:
    """Measure the peak memory of one request, beside the KV that it needs in any case."""
    named = policy_names(policies)
    return run_memory(setup.subject(), Workload(chunks, chunk_tokens, fresh_tokens), named, progress=setup.progress)


def run_memory(
    subject: Subject,
    workload: Workload,
    policies: Sequence[str],
    *,
    progress: Progress = silent,
) -> Report:
    """Measure how far the process's memory rises above what it was just before a request, for each policy.

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
        with subject.llm(kv_slots=workload.tokens + _SPARE_SLOTS + len(small)) as llm:
            cache_chunks(llm.engine, prompt)
            cache_chunks(llm.engine, small)
            llm.store.flush()
            first_token(llm.engine, small, policy)  # what any first request allocates once
            before = _return_free_memory()
            _CLEAR_REFS.write_text(_RESET_PEAK)
            first_token(llm.engine, prompt, policy)
            touched_before = len(small) * subject.loaded.kv_bytes_per_token  # the same slots of the pool
            peak = peak_memory() - before + touched_before
        rows.append(
            {
                "policy": policy,
                "context_tokens": len(prompt),
                "kv_mb": kv_bytes / 1e6,
                "peak_mb": peak / 1e6,
                "ratio_to_kv": peak / kv_bytes,
            }
        )
    return replace(subject.report(rows), columns=COLUMNS)


def _return_free_memory() -> int:
    """Give freed memory back to the system, so that it cannot hide what comes next; return the bytes left resident."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
