"""Prometheus metrics: counted from what the engine and the store publish, and read from them when scraped."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlinker.events import (
    ChunkDamaged,
    ChunkEvicted,
    ChunkLoaded,
    ChunkLookup,
    Event,
    FirstToken,
    ImplicitEvicted,
    ImplicitText,
    RequestFinished,
    TierUnavailable,
)
from kvlinker.llm import LLM, PREFILL_TOKENS
from kvlinker.types.messages import TextSource

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

SOURCES = ("cached", "recomputed", "fresh")

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_LOAD_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


class Metrics:
    """The figures of one app, in a registry of its own. Subscribe ``count`` to the LLM's events."""

    def __init__(self, llm: LLM) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(llm))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvlinker:{name}", text, labels, registry=self.registry)

        self._first_token = Histogram(
            "kvlinker:time_to_first_token_seconds",
            "From a request's arrival at the engine to its first token.",
            registry=self.registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self._load_seconds = Histogram(
            "kvlinker:load_seconds",
            "Time to load the KV of one chunk.",
            ("tier",),
            registry=self.registry,
            buckets=_LOAD_BUCKETS,
        )
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens by what became of them.", "source")
        self._exact_cached_tokens = counter(
            "exact_cached_tokens", "Cached prompt tokens that an earlier request computed in just that sequence."
        )
        self._output_tokens = counter("output_tokens", "Tokens generated.")
        self._requests = counter("requests", "Requests that ended.", "reason")
        self._lookups = counter("chunk_lookups", "Times that the store was asked for a chunk's KV.", "result", "tier")
        self._evictions = counter("evictions", "Chunks that a tier gave up for want of room.", "tier")
        self._implicit_texts = counter(
            "implicit_texts",
            "Texts that were to be chunks without an id, by why and by what came of it.",
            "source",
            "result",
        )
        self._implicit_evictions = counter("implicit_evictions", "Implicit context caches that made room for others.")
        self._damaged = counter("damaged_chunks", "Stored copies that failed their checks.", "tier")
        self._tier_errors = counter("tier_errors", "Times that a tier did not answer, or refused.", "tier")
        for text_source in TextSource:
            for result in ("hit", "created", "refused"):
                self._implicit_texts.labels(text_source, result)
        for source in SOURCES:
            self._prompt_tokens.labels(source)
        for tier in llm.tiers():
            self._evictions.labels(tier.name)
            self._tier_errors.labels(tier.name)

    def count(self, event: Event) -> None:
        """Listen to ``kvlinker.events.Events``; may be called from any thread."""
        match event:
            case FirstToken():
                self._first_token.observe(event.seconds)
            case RequestFinished():
                self._requests.labels(event.reason).inc()
                self._prompt_tokens.labels("cached").inc(event.cached_tokens)
                self._exact_cached_tokens.inc(event.exact_cached_tokens)
                self._prompt_tokens.labels("recomputed").inc(event.recomputed_tokens)
                self._prompt_tokens.labels("fresh").inc(event.fresh_tokens)
                self._output_tokens.inc(event.output_tokens)
            case ChunkLookup():
                self._lookups.labels("hit" if event.hit else "miss", event.tier).inc()
            case ChunkLoaded():
                self._load_seconds.labels(event.tier).observe(event.seconds)
            case ChunkEvicted():
                self._evictions.labels(event.tier).inc()
            case ImplicitText():
                self._implicit_texts.labels(event.source, event.outcome).inc()
            case ImplicitEvicted():
                self._implicit_evictions.inc(event.count)
            case ChunkDamaged():
                self._damaged.labels(event.tier).inc()
            case TierUnavailable():
                self._tier_errors.labels(event.tier).inc()

    def exposition(self) -> bytes:
        """All figures in Prometheus' text format."""
        return generate_latest(self.registry)

    def prompt_tokens(self) -> dict[str, int]:
        """Prompt tokens since the start, by what became of them."""
        return {source: self._total("kvlinker:prompt_tokens_total", source=source) for source in SOURCES}

    def output_tokens(self) -> int:
        """Tokens generated since the start."""
        return self._total("kvlinker:output_tokens_total")

    def finished(self) -> int:
        """Requests that ended since the start, whatever the reason."""
        (family,) = self._requests.collect()
        return int(sum(sample.value for sample in family.samples if sample.name.endswith("_total")))

    def _total(self, name: str, **labels: str) -> int:
        return int(self.registry.get_sample_value(name, labels) or 0)


class _Gauges(Collector):
    """Reads engine and store at the moment of a scrape."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        load = self._llm.load()
        for name, text, value in (
            ("healthy", "1 while the engine can answer, 0 once it has failed.", float(self._llm.healthy)),
            ("requests_running", "Requests being computed.", load.running),
            ("requests_waiting", "Requests in the queue.", load.waiting),
            ("kv_slots_used", "Slots of the KV pool in use; one slot holds one token.", load.slots_used),
            ("kv_slots_kept", "Slots that hold nothing but what later requests may reuse.", load.slots_kept),
            ("kv_slots_total", "Slots of the KV pool.", load.slots_total),
        ):
            yield GaugeMetricFamily(f"kvlinker:{name}", text, value=value)
        count, nbytes = self._llm.catalog.implicit.total()
        yield GaugeMetricFamily("kvlinker:implicit_caches", "Context caches that prompts' texts brought.", value=count)
        yield GaugeMetricFamily("kvlinker:implicit_bytes", "Bytes of their chunks' KV as computed.", value=nbytes)
        stored = GaugeMetricFamily("kvlinker:store_bytes", "Bytes of KV in the store.", labels=["tier"])
        chunks = GaugeMetricFamily("kvlinker:store_chunks", "Chunks in the store.", labels=["tier"])
        for usage in self._llm.tiers():
            stored.add_metric([usage.name], usage.used_bytes)
            chunks.add_metric([usage.name], usage.chunks)
        yield stored
        yield chunks
        bandwidth = GaugeMetricFamily(
            "kvlinker:tier_bandwidth_bytes_per_second", "Bytes that a tier delivers, as measured.", labels=["tier"]
        )
        for tier, bytes_per_second in self._llm.bandwidths().items():
            bandwidth.add_metric([tier], bytes_per_second)
        yield bandwidth
        prefill = GaugeMetricFamily(
            "kvlinker:prefill_tokens_per_second",
            f"Tokens of a prompt of {PREFILL_TOKENS} that the engine computes, as measured.",
        )
        if (rate := self._llm.prefill_rate()) is not None:
            prefill.add_metric([], rate)
        yield prefill
