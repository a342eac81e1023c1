"""A prompt whose chunks all lie in one tier, and its times from there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.measurement import TENANT, chunk_files, drop_from_page_cache
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.ttft import SPARE_SLOTS, policy_measurement
from kvlinker.store import ChunkKV, ChunkStore
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker_lab.store.files import read_seconds


@dataclass(frozen=True, slots=True)
class FirstTokenTimes:
    """Seconds: to the first token; of getting all chunks whole; of reading the tier's files, where
    it has files."""

    ttft: float
    whole: float
    reading: float | None = None


@dataclass(frozen=True, eq=False)
class TieredPrompt:
    """An engine whose store keeps the prompt's chunks in this tier alone."""

    tier: str
    codec: str
    folder: Path
    store: ChunkStore
    keys: Sequence[str]
    measure: dict[str, Callable[[], float]]

    @classmethod
    @contextmanager
    def start(
        cls,
        subject: MeasuredModel,
        prompt: Prompt,
        policies: Sequence[str],
        *,
        tier: str,
        codec: str = "",
        redis_url: str | None = None,
    ) -> Iterator[TieredPrompt]:
        """``codec``: of tiers but the host. What was stored is deleted in the end."""
        options: dict[str, Any] = {f"{tier}_codec": codec} if codec else {}
        if tier == "redis":
            options["redis_url"] = redis_url
        with subject.llm(kv_slots=len(prompt) + SPARE_SLOTS, tier=tier, **options) as llm:
            engine = llm.engine
            assert isinstance(engine, EmbeddedEngine)
            for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
                future.result()
            llm.store.flush()
            keys = [
                chunk_key(chunk, fingerprint=engine.fingerprint, tenant=TENANT)
                for chunk in prompt.chunks
            ]
            measure = {name: policy_measurement(engine, prompt, name) for name in policies}
            try:
                yield cls(tier, codec, llm.settings.state_dir, llm.store, keys, measure)
            finally:
                for key in keys:
                    llm.store.delete(key)

    @property
    def nbytes(self) -> int:
        """The bytes of all chunks in their tier."""
        return sum(self.store.nbytes(key) or 0 for key in self.keys)

    @property
    def states(self) -> tuple[str, ...]:
        """The states of the tier that are measured; one without a name where there is nothing to
        distinguish."""
        return ("warm", "cold") if self.tier == "disk" else ("",)

    def take(self, policy: str, state: str) -> FirstTokenTimes:
        """Measure in one of ``states``."""
        if self.tier == "host":
            return FirstTokenTimes(self.ttft(policy), 0.0)
        if self.tier != "disk":
            return FirstTokenTimes(self.ttft(policy), self._get_all())
        files = chunk_files(self.folder)
        prepare = read_seconds if state == "warm" else drop_from_page_cache
        prepare(files)
        reading = read_seconds(files)
        prepare(files)
        ttft = self.ttft(policy)
        prepare(files)
        return FirstTokenTimes(ttft, self._get_all(), reading)

    def ttft(self, policy: str) -> float:
        """Return the seconds to the first token, with the tier as it is."""
        return self.measure[policy]()

    def load_seconds(self) -> float:
        """Return the seconds of reading all chunks layer by layer, while nothing is computed."""
        begin = time.perf_counter()
        found = [future.result() for future in self.store.load(self.keys, Urgency())]
        seconds = time.perf_counter() - begin
        complete = [kv is not None and (isinstance(kv, ChunkKV) or kv.complete) for kv in found]
        assert all(complete), "a chunk was lost"
        return seconds

    def _get_all(self) -> float:
        begin = time.perf_counter()
        found = [self.store.get(key) for key in self.keys]
        seconds = time.perf_counter() - begin
        assert None not in found
        return seconds
