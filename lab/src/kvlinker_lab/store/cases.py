"""The cases of the benchmark of the chunk store, what its tiers cost a request and what many chunks
cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.measurement import Workload, check_cold_reads
from kvlinker.quality.bench.harness.report import Report
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.store.redaction import place_of, redacted
from kvlinker_lab.store.crowd import crowd_rows
from kvlinker_lab.store.first_token import first_token_rows
from kvlinker_lab.store.hiding import hiding_rows
from kvlinker_lab.store.throughput import throughput_rows
from kvlinker_lab.store.writing import writing_rows

REDIS_SECONDS = 5.0
"""How long a Redis server may take to answer at first."""


def run_store(
    subject: MeasuredModel,
    workload: Workload,
    *,
    policies: Sequence[str],
    tiers: Sequence[str],
    codecs: Sequence[str],
    entries: int,
    cases: Sequence[str],
    repeat: int,
    redis_url: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """Measure the named cases, each with its competitors in turn.

    ``tiers``: besides the host's memory. ``entries``: how many chunks are many. ``redis_url``: of
    the tier ``redis``.

    Raises InvalidRequestError for an unknown case, and where the page cache cannot be emptied.
    """
    measured = {
        "ttft": lambda: first_token_rows(
            subject,
            workload,
            policies,
            tiers,
            codecs,
            redis_url=redis_url,
            repeat=repeat,
            progress=progress,
        ),
        "hiding": lambda: hiding_rows(
            subject, workload, policies, redis_url=redis_url, repeat=repeat, progress=progress
        ),
        "writing": lambda: writing_rows(
            subject, workload, policies, repeat=repeat, progress=progress
        ),
        "throughput": lambda: throughput_rows(
            subject, workload, codecs, repeat=repeat, progress=progress
        ),
        "crowd": lambda: crowd_rows(entries, progress=progress),
    }
    check_cold_reads()
    if redis_url is not None:
        _check_redis(redis_url)
    for case in cases:
        if case not in measured:
            raise InvalidRequestError(
                f"Unknown case {case!r}; known are {', '.join(measured)}.", param="cases"
            )
    return subject.report([row for case in cases for row in measured[case]()])


def _check_redis(url: str) -> None:
    """Raise InvalidRequestError where no Redis server answers."""
    import redis

    try:
        redis.Redis.from_url(url, socket_connect_timeout=REDIS_SECONDS).ping()
    except (redis.RedisError, ValueError) as error:
        raise InvalidRequestError(
            f"No Redis server answers at {place_of(url)}: {redacted(str(error), url)}. Start one,"
            " or leave --redis-url out.",
            param="redis_url",
        ) from error
