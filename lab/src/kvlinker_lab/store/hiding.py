"""The gain of layer-wise loading: how much of it computing hides, with a medium whose bandwidth is
limited."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.store.loading.bandwidths import DRIFT_NOTES
from kvlinker_lab.store.rows import store_row
from kvlinker_lab.store.throttling_proxy import throttling_proxy
from kvlinker_lab.store.tiered import TieredPrompt

LOAD_TO_COMPUTE = (0.5, 1.0, 2.0)
"""The loading times to measure, as multiples of the computation's time."""

CODEC = "raw"


@dataclass(frozen=True, slots=True)
class TurnTimes:
    """Seconds of one turn: of loading alone, of computing from host memory, and of both
    together."""

    load: float
    compute: float
    together: float

    @property
    def hidden(self) -> float:
        """The share that was hidden of the time that could have been: of the shorter of loading and
        computing."""
        return (self.load + self.compute - self.together) / min(self.load, self.compute)


def hiding_rows(
    subject: MeasuredModel,
    workload: Workload,
    policies: Sequence[str],
    *,
    redis_url: str | None,
    repeat: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """Measure from a Redis server behind a throttling proxy, and from the disk, whose pages are in
    memory: reading these is work, which computing on the same processors cannot hide.

    The bandwidths are chosen for each policy by what it computes. Loading alone, computing alone
    and both together take turns, ``repeat`` times; medians are reported. Raises InvalidRequestError
    without the URL of a Redis server.
    """
    if redis_url is None:
        raise InvalidRequestError(
            "The case hiding needs the URL of a Redis server: give --redis-url.", param="cases"
        )
    prompt = workload.prompt(subject.loaded.model.config.vocab_size)
    rows = []
    with ExitStack() as stack:
        progress(f"caching {workload.chunks} chunks in host memory, on disk and in Redis")
        proxy = stack.enter_context(throttling_proxy(redis_url))
        url = proxy.url(redis_url)
        host, disk, redis = (
            stack.enter_context(
                TieredPrompt.start(subject, prompt, policies, tier=tier, codec=codec, redis_url=url)
            )
            for tier, codec in (("host", ""), ("disk", CODEC), ("redis", CODEC))
        )
        for policy in policies:
            compute = statistics.median(host.ttft(policy) for _ in range(DRIFT_NOTES))
            for share in LOAD_TO_COMPUTE:
                proxy.bandwidth = redis.nbytes / (share * compute)
                progress(f"{policy} at {proxy.bandwidth / 1e6:.0f} MB/s")
                taken = _measure_turns(host, redis, policy, repeat)
                case = f"time to first token, loading {share:g} × computing"
                rows.append(_row(redis, policy, case, taken, bandwidth=proxy.bandwidth))
            progress(f"{policy} from disk")
            taken = _measure_turns(host, disk, policy, repeat)
            measured = disk.nbytes / statistics.median(one.load for one in taken)
            rows.append(_row(disk, policy, "time to first token, warm", taken, bandwidth=measured))
    return rows


def _measure_turns(
    host: TieredPrompt, other: TieredPrompt, policy: str, repeat: int
) -> list[TurnTimes]:
    for _ in range(DRIFT_NOTES):  # until the store believes the bandwidth
        other.load_seconds()
    other.ttft(policy)
    return [
        TurnTimes(other.load_seconds(), host.ttft(policy), other.ttft(policy))
        for _ in range(repeat)
    ]


def _row(
    tiered: TieredPrompt, policy: str, case: str, taken: Sequence[TurnTimes], *, bandwidth: float
) -> Row:
    middle = TurnTimes(
        statistics.median(one.load for one in taken),
        statistics.median(one.compute for one in taken),
        statistics.median(one.together for one in taken),
    )
    row = store_row(
        tiered.tier,
        case,
        middle.together,
        codec=tiered.codec,
        policy=policy,
        nbytes=tiered.nbytes,
        host=middle.compute,
        beside=("load, then compute", middle.load + middle.compute),
    )
    hidden = sorted(100 * one.hidden for one in taken)
    return {
        **row,
        "bandwidth": bandwidth,
        "load_ms": 1e3 * middle.load,
        "compute_ms": 1e3 * middle.compute,
        "hidden_percent": statistics.median(hidden),
        "hidden_percent_range": [hidden[0], hidden[-1]],
    }
