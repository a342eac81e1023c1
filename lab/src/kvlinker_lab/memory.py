"""Measures the memory of one more linked request: the KV of its own, and the peak, beside the KV of
its whole context.

Linux only: it reads /proc.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import Delta
from kvlinker.engines.contract.contract import Failed, GenerationEvent, GenerationRequest
from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Policies,
    Setup,
    benchmark,
    policy_names,
)
from kvlinker.quality.bench.harness.measurement import (
    Workload,
    cache_chunks,
    first_token,
    greedy_request,
)
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.processes import peak_memory

if TYPE_CHECKING:
    from kvlinker.llm import LLM

COLUMNS = ("policy", "context_tokens", "kv_mb", "own_kv_mb", "peak_mb", "ratio_to_kv")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_SPARE_SLOTS = 2048
"""The KV slots beyond those of the prompts, for answers."""

_TOKENS = 4
"""Tokens of the answer: while it decodes, the slots that it holds can be counted."""


@benchmark("memory")
def memory(
    setup: Setup,
    *,
    chunks: Chunks = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,full",
) -> Report:
    """Measure the memory of one more linked request: its own KV, and its peak, beside the KV of its
    whole context."""
    named = policy_names(policies)
    return run_memory(
        setup.subject(),
        Workload(chunks, chunk_tokens, fresh_tokens),
        named,
        progress=setup.progress,
    )


def run_memory(
    subject: MeasuredModel,
    workload: Workload,
    policies: Sequence[str],
    *,
    progress: Progress = silent,
) -> Report:
    """Measure how far the process's memory rises during a request, for each policy.

    A fresh pool's pages count from their first use. The rise is therefore the KV of the request's
    own, ``own_kv_mb``, and everything else that it allocates. The KV of cached chunks is shared
    with other requests, and not counted.
    """
    if not _CLEAR_REFS.exists():
        raise InvalidRequestError(
            "kvlinker-lab memory needs Linux: there is no /proc/self/clear_refs here."
        )
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
            slots = _slots_held(llm, greedy_request(prompt, policy, max_tokens=_TOKENS))
            touched_before = (
                len(small) * subject.loaded.kv_bytes_per_token
            )  # the same slots of the pool
            peak = peak_memory() - before + touched_before
        rows.append(
            {
                "policy": policy,
                "context_tokens": len(prompt),
                "kv_mb": kv_bytes / 1e6,
                "own_kv_mb": slots * subject.loaded.kv_bytes_per_token / 1e6,
                "peak_mb": peak / 1e6,
                "ratio_to_kv": peak / kv_bytes,
            }
        )
    return replace(subject.report(rows), columns=COLUMNS)


def _slots_held(llm: LLM, request: GenerationRequest) -> int:
    """Answer the request, and return the most slots of the KV pool that it held. Raises the error
    of a failed request."""
    held: queue.SimpleQueue[int | GenerationEvent] = queue.SimpleQueue()

    def listen(_: int, event: GenerationEvent) -> None:
        held.put(llm.current_load().slots_used)
        if not isinstance(event, Delta):
            held.put(event)

    llm.engine.generate(request, listen)
    most = 0
    while isinstance(event := held.get(), int):
        most = max(most, event)
    if isinstance(event, Failed):
        raise event.error
    return most


def _return_free_memory() -> int:
    """Give freed memory back to the system, so that it cannot hide what comes next; return the
    bytes left resident."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)
