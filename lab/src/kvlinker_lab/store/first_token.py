"""Time to first token by tier and codec; from disk with its pages in memory, and without them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from kvlinker.quality.bench.harness.measurement import Workload
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab.store.rows import store_row
from kvlinker_lab.store.tiered import FirstTokenTimes, TieredPrompt


@dataclass(frozen=True, slots=True)
class _Case:
    policy: str
    tiered: TieredPrompt
    state: str

    def row(
        self, name: str, seconds: float, *, host: float, beside: tuple[str, float] | None
    ) -> Row:
        return store_row(
            self.tiered.tier,
            f"{name}, {self.state}" if self.state else name,
            seconds,
            codec=self.tiered.codec,
            policy=self.policy,
            nbytes=self.tiered.nbytes,
            host=host,
            beside=beside,
        )


def first_token_rows(
    subject: MeasuredModel,
    workload: Workload,
    policies: Sequence[str],
    tiers: Sequence[str],
    codecs: Sequence[str],
    *,
    redis_url: str | None,
    repeat: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """The host's memory, and ``tiers`` with each codec, in turn, ``repeat`` times after one
    warm-up; medians.

    ``load, then compute`` is what a store without layer-wise loading takes: all chunks are read
    before the prompt is computed from host memory.
    """
    prompt = workload.prompt(subject.loaded.model.config.vocab_size)
    with ExitStack() as stack:
        progress(f"caching {workload.chunks} chunks in every tier")
        start = partial(TieredPrompt.start, subject, prompt, policies)
        host = stack.enter_context(start(tier="host"))
        others = [
            stack.enter_context(start(tier=tier, codec=codec, redis_url=redis_url))
            for tier in tiers
            for codec in codecs
        ]
        cases = [
            _Case(policy, tiered, state)
            for policy in policies
            for tiered in (host, *others)
            for state in tiered.states
        ]
        taken: dict[_Case, list[FirstTokenTimes]] = {case: [] for case in cases}
        for turn in range(repeat + 1):
            for case in cases:
                progress(
                    f"turn {turn} of {repeat}: {case.policy} from {case.tiered.tier} {case.state}"
                )
                one = case.tiered.take(case.policy, case.state)
                if turn:
                    taken[case].append(one)
        at_host = {case.policy: _median_ttft(taken[case]) for case in cases if case.tiered is host}
        return [row for case in cases for row in _rows(case, taken[case], at_host[case.policy])]


def _rows(case: _Case, taken: Sequence[FirstTokenTimes], at_host: float) -> Iterator[Row]:
    ttft = _median_ttft(taken)
    if case.tiered.tier == "host":
        yield case.row("time to first token", ttft, host=at_host, beside=None)
        return
    readings = [one.reading for one in taken if one.reading is not None]
    reading = statistics.median(readings) if readings else 0.0
    slower = ("reading the files", reading) if reading > at_host else ("host", at_host)
    yield case.row("time to first token", ttft, host=at_host, beside=slower)
    before = statistics.median(one.whole for one in taken) + at_host
    yield case.row("load, then compute", before, host=at_host, beside=("layer-wise", ttft))


def _median_ttft(taken: Sequence[FirstTokenTimes]) -> float:
    return statistics.median(one.ttft for one in taken)
