"""Prometheus metrics. Counters follow the events of engine and store, and gauges are read at each
scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvlinker.base.events import (
    AgreementFell,
    AnswerAudited,
    AnswerKept,
    AuditSkipped,
    ChunkDamaged,
    ChunkEvicted,
    ChunkLoaded,
    ChunkLookup,
    Event,
    EvictionSwap,
    FirstToken,
    ImplicitEvicted,
    ImplicitText,
    PrefixRestored,
    PrefixSpilled,
    RequestFinished,
    SuccessorsPredicted,
    TierUnavailable,
)
from kvlinker.base.types.messages import TextSource
from kvlinker.llm import LLM, PREFILL_TOKENS

SOURCES = ("cached", "recomputed", "fresh")

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_KL_BUCKETS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)
_LOAD_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10)


class Metrics:
    """Keeps the figures of one app, in a registry of its own. Subscribe ``count`` to the LLM's
    events."""

    def __init__(self, llm: LLM) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Gauges(llm))
        self._has_vllm = llm.settings.engine == "vllm"

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvlinker:{name}", text, labels, registry=self.registry)

        self._first_token = Histogram(
            "kvlinker:time_to_first_token_seconds",
            "Seconds from a request's arrival at the engine to its first token.",
            registry=self.registry,
            buckets=_FIRST_TOKEN_BUCKETS,
        )
        self._load_seconds = Histogram(
            "kvlinker:load_seconds",
            "Seconds to load the KV of one chunk.",
            ("tier",),
            registry=self.registry,
            buckets=_LOAD_BUCKETS,
        )
        self._prompt_tokens = counter(
            "prompt_tokens",
            "Prompt tokens by how their KV was made: cached, recomputed or fresh.",
            "source",
        )
        self._exact_cached_tokens = counter(
            "exact_cached_tokens",
            "Cached prompt tokens that an earlier request computed in the same sequence.",
        )
        self._output_tokens = counter("output_tokens", "Tokens generated.")
        self._requests = counter("requests", "Requests that ended.", "reason")
        self._lookups = counter(
            "chunk_lookups", "Lookups of a chunk's KV in the store.", "result", "tier"
        )
        self._evictions_spared = counter(
            "evictions_spared",
            "Evictions that spared a chunk with a predicted use and evicted another of its owner.",
        )
        self._foretold = counter(
            "foretold_chunks",
            "Chunks that were predicted to be used next: a hit was used, a miss was not.",
            "result",
        )
        self._evictions = counter("evictions", "Chunks that a tier evicted to make room.", "tier")
        self._spilled_tokens = counter(
            "spilled_tokens",
            "Tokens of prefixes whose KV was evicted from the pool and written to disk.",
        )
        self._restored_tokens = counter(
            "restored_tokens", "Tokens of prefixes whose KV was read back from disk."
        )
        self._answers_kept = counter(
            "answers_kept", "Answers to be kept as context caches: kept, or refused.", "result"
        )
        self._implicit_texts = counter(
            "implicit_texts",
            "Texts without an id that were to become chunks, by reason and result.",
            "source",
            "result",
        )
        self._implicit_evictions = counter(
            "implicit_evictions", "Implicit context caches evicted to make room for others."
        )
        self._damaged = counter("damaged_chunks", "Stored copies that failed their checks.", "tier")
        self._tier_errors = counter(
            "tier_errors", "Calls that a tier did not answer, or refused.", "tier"
        )
        self._audited = counter(
            "audit_samples", "Answers compared with the full computation.", "policy"
        )
        self._audit_agreeing = counter(
            "audit_agreeing",
            "Audited answers whose first token equals the full computation's.",
            "policy",
        )
        self._audit_alike = counter(
            "audit_alike",
            "Audited answers all of whose tokens equal the full computation's.",
            "policy",
        )
        self._audit_tokens = counter("audit_tokens", "Tokens that the audit computed.")
        self._audit_skipped = counter(
            "audit_skipped", "Requests drawn for the audit that were not compared.", "reason"
        )
        self._audit_drifts = counter(
            "audit_drifts", "Detected falls of a policy's agreement.", "policy"
        )
        self._audit_kl, self._audit_answer_kl = (
            Histogram(
                f"kvlinker:{name}", text, ("policy",), registry=self.registry, buckets=_KL_BUCKETS
            )
            for name, text in (
                (
                    "audit_kl",
                    (
                        "Divergence of the first token's distribution from the full computation's,"
                        " in nats."
                    ),
                ),
                ("audit_answer_kl", "Mean divergence along an answer, in nats."),
            )
        )
        for text_source in TextSource:
            for result in ("hit", "created", "refused"):
                self._implicit_texts.labels(text_source, result)
        for source in SOURCES:
            self._prompt_tokens.labels(source)
        for tier in llm.tiers():
            self._evictions.labels(tier.name)
            self._tier_errors.labels(tier.name)

    def count(self, event: Event) -> None:
        """Listen to ``kvlinker.base.events.Events``; may be called from any thread."""
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
            case PrefixSpilled():
                self._spilled_tokens.inc(event.tokens)
            case PrefixRestored():
                self._restored_tokens.inc(event.tokens)
            case ImplicitText():
                self._implicit_texts.labels(event.source, event.outcome).inc()
            case EvictionSwap():
                self._evictions_spared.inc()
            case SuccessorsPredicted():
                self._foretold.labels("hit").inc(event.followed)
                self._foretold.labels("miss").inc(event.others)
            case AnswerKept():
                self._answers_kept.labels("kept" if event.kept else "refused").inc()
            case ImplicitEvicted():
                self._implicit_evictions.inc(event.count)
            case AnswerAudited():
                self._count_audited(event)
            case AuditSkipped():
                self._audit_skipped.labels(event.reason).inc()
            case AgreementFell():
                self._audit_drifts.labels(event.policy).inc()
            case ChunkDamaged():
                self._damaged.labels(event.tier).inc()
            case TierUnavailable():
                self._tier_errors.labels(event.tier).inc()

    def _count_audited(self, event: AnswerAudited) -> None:
        self._audited.labels(event.policy).inc()
        self._audit_agreeing.labels(event.policy).inc(event.agrees)
        self._audit_alike.labels(event.policy).inc(event.alike)
        self._audit_tokens.inc(event.tokens)
        if event.kl is not None and event.answer_kl is not None:
            self._audit_kl.labels(event.policy).observe(event.kl)
            self._audit_answer_kl.labels(event.policy).observe(event.answer_kl)

    def exposition(self) -> bytes:
        """Return all figures in Prometheus' text format, with those of vLLM where it is the
        engine."""
        own = generate_latest(self.registry)
        return own + generate_latest(REGISTRY) if self._has_vllm else own

    def prompt_tokens(self) -> dict[str, int]:
        """Count prompt tokens since the start, by how they were computed."""
        return {source: _total(self._prompt_tokens, source=source) for source in SOURCES}

    def output_tokens(self) -> int:
        """Count the tokens generated since the start."""
        return _total(self._output_tokens)

    def finished(self) -> int:
        """Count the requests that ended since the start, whatever the reason."""
        return _total(self._requests)


def _total(counter: Counter, **labels: str) -> int:
    """Return a counter's sum over all labels, or those that have these values."""
    (family,) = counter.collect()
    totals = (sample for sample in family.samples if sample.name.endswith("_total"))
    return int(sum(sample.value for sample in totals if labels.items() <= sample.labels.items()))


class _Gauges(Collector):
    """Reads engine and store at the moment of a scrape."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        load = self._llm.current_load()
        for name, text, value in (
            ("requests_running", "Requests being computed.", load.running),
            ("requests_waiting", "Requests in the queue.", load.waiting),
            (
                "kv_slots_used",
                "Slots of the KV pool in use; one slot holds one token.",
                load.slots_used,
            ),
            (
                "kv_slots_kept",
                "Slots with KV that no running request uses and later requests may reuse.",
                load.slots_kept,
            ),
            ("kv_slots_total", "Slots of the KV pool.", load.slots_total),
        ):
            yield GaugeMetricFamily(f"kvlinker:{name}", text, value=value)
        count, nbytes = self._llm.catalog.implicit.total()
        yield GaugeMetricFamily(
            "kvlinker:implicit_caches",
            "Implicit context caches, made from the texts of prompts.",
            value=count,
        )
        yield GaugeMetricFamily(
            "kvlinker:implicit_bytes",
            "Bytes of the KV, as computed, of implicit context caches.",
            value=nbytes,
        )
        yield GaugeMetricFamily(
            "kvlinker:spilled_bytes",
            "Bytes of prefixes on disk, without chunks.",
            value=self._llm.spilled_bytes(),
        )
        yield GaugeMetricFamily(
            "kvlinker:held_bytes",
            "Bytes of chunks that requests hold in memory.",
            value=self._llm.held_bytes(),
        )
        stored = GaugeMetricFamily(
            "kvlinker:store_bytes", "Bytes of KV in the store.", labels=["tier"]
        )
        chunks = GaugeMetricFamily("kvlinker:store_chunks", "Chunks in the store.", labels=["tier"])
        for usage in self._llm.tiers():
            stored.add_metric([usage.name], usage.used_bytes)
            chunks.add_metric([usage.name], usage.chunks)
        yield stored
        yield chunks
        bandwidth = GaugeMetricFamily(
            "kvlinker:tier_bandwidth_bytes_per_second",
            "Measured bytes per second that a tier delivers.",
            labels=["tier"],
        )
        for tier, bytes_per_second in self._llm.bandwidths().items():
            bandwidth.add_metric([tier], bytes_per_second)
        yield bandwidth
        prefill = GaugeMetricFamily(
            "kvlinker:prefill_tokens_per_second",
            f"Measured tokens per second of computing a prompt of {PREFILL_TOKENS} tokens.",
        )
        if (rate := self._llm.prefill_rate()) is not None:
            prefill.add_metric([], rate)
        yield prefill
        yield from self._audit()

    def _audit(self) -> Iterator[Metric]:
        """Yield the agreement of each policy with its exact interval, where there is an audit."""
        auditor = self._llm.policy_manager.auditor
        if auditor is None:
            return
        yield GaugeMetricFamily(
            "kvlinker:audit_pending", "Answers that wait to be compared.", value=auditor.pending
        )
        agreement = GaugeMetricFamily(
            "kvlinker:audit_agreement",
            "Share of answers whose first token is the full computation's, and its exact 95%"
            " interval.",
            labels=["policy", "bound"],
        )
        for policy, tally in auditor.figures.by_policy().items():
            low, high = tally.agreement_interval
            for bound, value in (("low", low), ("value", tally.agreement), ("high", high)):
                agreement.add_metric([policy, bound], value)
        yield agreement
