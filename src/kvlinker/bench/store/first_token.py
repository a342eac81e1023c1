"""Time to first token by tier and codec: from host memory, from disk with its pages in memory, and without them."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from kvlinker.bench.report import Row
from kvlinker.bench.store.files import chunk_files, drop_from_page_cache, read_seconds, total_bytes
from kvlinker.bench.store.rows import store_row
from kvlinker.bench.subject import Subject
from kvlinker.bench.ttft import SPARE_SLOTS, STEP_TOKENS, TENANT, Measurement, Workload, policy_measurement
from kvlinker.chunks import chunk_key
from kvlinker.engine.embedded import EmbeddedEngine
from kvlinker.llm import LLM
from kvlinker.prompt.segments import Prompt

HOST = ("host", "")


def first_token_rows(
    subject: Subject,
    workload: Workload,
    policies: Sequence[str],
    codecs: Sequence[str],
    *,
    repeat: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """All tiers, codecs and policies in turn, ``repeat`` times after one warm-up; medians.

    ``load, then compute`` is what a store without layer-wise loading takes: all chunks are read before the prompt is
    computed from host memory.
    """
    prompt = workload.prompt(subject.loaded.model.config.vocab_size)
    with ExitStack() as stack:
        progress(f"caching {workload.chunks} chunks in every tier")
        host = _Competitor.start(stack, subject, prompt, policies, tier="host")
        disks = {
            codec: _Competitor.start(stack, subject, prompt, policies, tier="disk", disk_codec=codec)
            for codec in codecs
        }
        taken: dict[tuple[str, str, str], list[float]] = defaultdict(list)
        for turn in range(repeat + 1):
            for policy in policies:
                progress(f"turn {turn} of {repeat}: {policy}")
                measured = {("host", "", policy): host.ttft(policy)}
                for codec, disk in disks.items():
                    measured |= {(f"disk {case}", codec, policy): s for case, s in disk.times(policy).items()}
                for key, seconds in measured.items():
                    if turn:
                        taken[key].append(seconds)
        medians = {key: statistics.median(seconds) for key, seconds in taken.items()}
        return [row for policy in policies for row in _rows(policy, host, disks, medians)]


def _rows(
    policy: str, host: _Competitor, disks: dict[str, _Competitor], medians: dict[tuple[str, str, str], float]
) -> list[Row]:
    at_host = medians["host", "", policy]
    rows = [store_row("host", "time to first token", at_host, policy=policy, nbytes=host.nbytes, host=at_host)]
    for codec, disk in disks.items():
        for state in ("warm", "cold"):
            pipelined = medians[f"disk {state}", codec, policy]
            reading = medians[f"disk {state}, read", codec, policy]
            slower = ("reading the files", reading) if reading > at_host else ("host", at_host)
            before = medians[f"disk {state}, whole", codec, policy] + at_host
            cases = (
                (f"time to first token, {state}", pipelined, slower),
                (f"load, then compute, {state}", before, ("layer-wise", pipelined)),
            )
            rows += [
                store_row("disk", case, s, codec=codec, policy=policy, nbytes=disk.nbytes, host=at_host, beside=beside)
                for case, s, beside in cases
            ]
    return rows


@dataclass(frozen=True)
class _Competitor:
    """An engine whose chunks lie in one tier."""

    llm: LLM
    keys: Sequence[str]
    measure: dict[str, Callable[[], Measurement]]

    @classmethod
    def start(
        cls,
        stack: ExitStack,
        subject: Subject,
        prompt: Prompt,
        policies: Sequence[str],
        *,
        tier: str,
        **options: str,
    ) -> _Competitor:
        llm = stack.enter_context(
            subject.llm(kv_slots=len(prompt) + SPARE_SLOTS, tier=tier, max_step_tokens=STEP_TOKENS, **options)
        )
        engine = llm.engine
        assert isinstance(engine, EmbeddedEngine)
        for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
            future.result()
        llm.store.flush()
        keys = [chunk_key(chunk, fingerprint=engine.fingerprint, tenant=TENANT) for chunk in prompt.chunks]
        measure = {name: policy_measurement(engine, subject.loaded, prompt, name) for name in policies}
        return cls(llm, keys, measure)

    @property
    def nbytes(self) -> int:
        """Of all chunks in their tier."""
        return sum(self.llm.store.nbytes(key) or 0 for key in self.keys)

    def ttft(self, policy: str) -> float:
        return self.measure[policy]().ttft

    def times(self, policy: str) -> dict[str, float]:
        """Of a prompt from disk, warm and cold: to the first token, of reading its files, and of getting its chunks
        whole."""
        files = chunk_files(self.llm.settings.state_dir)
        assert total_bytes(files)
        seconds = {}
        for state, prepare in (("warm", read_seconds), ("cold", drop_from_page_cache)):
            prepare(files)
            seconds[f"{state}, read"] = read_seconds(files)
            prepare(files)
            seconds[state] = self.ttft(policy)
            prepare(files)
            seconds[f"{state}, whole"] = self._get_all()
        return seconds

    def _get_all(self) -> float:
        begin = time.perf_counter()
        for key in self.keys:
            assert self.llm.store.get(key) is not None, key
        return time.perf_counter() - begin
