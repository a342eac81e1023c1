"""What HTTP adds to a request, beside the same request in Python."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvlinker.client import Client
from kvlinker.llm import LLM
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.served import served
from kvlinker.research.bench.subject import Subject
from kvlinker.research.bench.ttft import Workload
from kvlinker.store import ContextCache

COLUMNS = ("case", "ms", "over_python_ms")


def run_overhead(
    subject: Subject,
    workload: Workload,
    policy: str,
    *,
    repeat: int,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """One linked chat completion of one token, in Python and over HTTP in turn, ``repeat`` times; medians."""
    taken: dict[str, list[float]] = {"python": [], "http": []}
    with subject.llm(kv_slots=2 * workload.tokens + 4096) as llm, served(llm) as url, Client(url) as client:
        texts = [f"{index:04d} " + "x" * (workload.chunk_tokens - 5) for index in range(workload.chunks)]
        caches = llm.generate_context_cache(texts)
        targets: dict[str, LLM | Client] = {"python": llm, "http": client}
        for turn in range(repeat + 1):
            for case, target in targets.items():
                progress(f"turn {turn} of {repeat}: {case}")
                begin = time.perf_counter()
                _ask(target, caches, policy)
                if turn:
                    taken[case].append(time.perf_counter() - begin)
    medians = {case: 1e3 * statistics.median(seconds) for case, seconds in taken.items()}
    rows: list[Row] = [
        {"case": case, "ms": median, "over_python_ms": median - medians["python"]} for case, median in medians.items()
    ]
    return subject.report(rows)


def _ask(target: LLM | Client, caches: tuple[ContextCache, ...], policy: str) -> None:
    parts = [{"type": "context_cache", "id": cache.id} for cache in caches]
    messages = [{"role": "user", "content": [*parts, "What do these have in common?"]}]
    target.chat_completion(messages, policy=policy, temperature=0, max_tokens=1)
