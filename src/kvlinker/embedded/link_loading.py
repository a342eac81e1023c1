"""From a request to what the engine computes: its chunks' KV fetched, and the plan made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvlinker.embedded.chunk_builder import ChunkBuilder
from kvlinker.embedded.throughput import Pace
from kvlinker.embedded.variants import VariantLibrary
from kvlinker.engine.contract import GenerationRequest
from kvlinker.errors import KVLinkerError
from kvlinker.futures import gather
from kvlinker.linking.evidence import Forecast, NoVariants, PromptEvidence
from kvlinker.linking.plan import LinkPlan, chunk_uses, make_plan, probe_plan, ranges
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.bandwidth import LoadTime
from kvlinker.types.chunks import Chunk, chunk_key

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Link:
    """A plan with the KV of its placements. With a policy that probes, the plan of the first pass.

    ``evidence``: what the policy may look at, but for the probe. ``forecast``: by which it settled, if it did.
    """

    plan: LinkPlan
    kvs: tuple[ChunkKV, ...]
    evidence: PromptEvidence
    forecast: Forecast | None = None

    def with_attention(self, attention: NDArray[np.float32]) -> Link:
        """For the second pass, ``attention`` [layers, length] being what the first one showed."""
        evidence = PromptEvidence(self.evidence.chunk_scores, attention)
        return replace(self, plan=make_plan(self.plan.prompt, self.plan.policy, evidence), evidence=evidence)


class LinkLoader:
    """Arranges, fetches and plans. Methods may be called from any thread."""

    def __init__(
        self,
        fingerprint: str,
        layers: int,
        store: ChunkStore,
        builder: ChunkBuilder,
        variants: VariantLibrary | None,
        pace: Pace,
    ) -> None:
        """``fingerprint`` and ``layers``: of the model. ``builder`` computes what the store lost, at about this
        ``pace``."""
        self._fingerprint = fingerprint
        self._layers = layers
        self._store = store
        self._builder = builder
        self._variants = variants
        self._pace = pace

    def link(self, request: GenerationRequest, *, at_hand: bool = False) -> Future[Link]:
        """Fetch what the request's policy needs; layers of it may still be on their way (see ``ChunkStore.load``).

        ``at_hand``: what is not in memory is computed, whatever slower tiers have. Raises KVLinkerError when the policy
        fails; later errors are the future's.
        """
        policy, tenant, forecast = request.policy, request.tenant, None
        with asking(policy):
            prompt = self._arranged(request)
            if policy.forecasts:
                forecast = self._forecast(prompt, tenant, at_hand=at_hand)
                policy = policy.settle(forecast)
        fetch = partial(self._fetch, tenant=tenant, at_hand=at_hand, forecast=forecast)
        if policy.uses_scores or policy.probes:
            fetched = fetch(prompt.chunks, computed=ranges(~prompt.cached))
            return gather(fetched, partial(_plan_with_scores, prompt, policy, forecast))
        evidence = PromptEvidence()
        with asking(policy):
            plan = make_plan(prompt, policy, evidence)
        chunks = [placement.chunk for placement in plan.placements]
        if forecast is not None and forecast.load != 0:
            self._store.load_ahead(self._keys([chunk for chunk in prompt.chunks if chunk not in chunks], tenant))
        fetched = fetch(chunks, computed=plan.runs)
        return gather(fetched, lambda kvs: Link(plan, kvs, evidence, forecast))

    def note_use(
        self, request: GenerationRequest, plan: LinkPlan, dropped: Sequence[tuple[int, NDArray[np.int64]]]
    ) -> None:
        """The request's prompt has been computed by this plan; ``dropped`` as of ``chunk_uses``. To be told once."""
        for use in chunk_uses(plan, self._layers, dropped):
            key = chunk_key(use.chunk, fingerprint=self._fingerprint, tenant=request.tenant)
            self._store.note_use(key, use.recomputed)
            if self._variants is not None and use.chunk not in request.prompt.chunks:
                self._variants.note_use(key, use.recomputed)

    def _arranged(self, request: GenerationRequest) -> Prompt:
        if self._variants is None or not request.policy.uses_variants:
            return request.policy.arrange(request.prompt, NoVariants())
        return request.policy.arrange(request.prompt, self._variants.of(request.tenant))

    def _forecast(self, prompt: Prompt, tenant: str, *, at_hand: bool) -> Forecast:
        load = LoadTime() if at_hand else self._store.load_time(self._keys(prompt.chunks, tenant))
        prefill = self._pace.prefill_seconds(int(prompt.cached.sum()))
        if load is None:
            return Forecast(None, prefill)
        return Forecast(load.seconds, prefill, overlaps=load.waits or not self._pace.on_host)

    def _keys(self, chunks: Sequence[Chunk], tenant: str) -> list[str]:
        return [chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant) for chunk in chunks]

    def _fetch(
        self,
        chunks: Sequence[Chunk],
        *,
        tenant: str,
        computed: Sequence[tuple[int, int]],
        at_hand: bool,
        forecast: Forecast | None,
    ) -> list[Future[ChunkKV]]:
        """``computed``: positions that the prompt computes once these chunks are placed. Where the policy settled on
        loading them all, that is done."""
        keys = self._keys(chunks, tenant)
        if at_hand:
            found = [_done(self._store.get_at_hand(key)) for key in keys]
        else:
            decided = forecast is not None and forecast.worth_loading
            cached = sum(len(chunk) for chunk in chunks)
            found = self._store.load(keys, self._pace.urgency(computed, cached=cached, decided=decided))
        return [
            _or_else(kv, partial(self._builder.build, key, chunk, urgent=True))
            for kv, key, chunk in zip(found, keys, chunks, strict=True)
        ]


def _done(kv: ChunkKV | None) -> Future[ChunkKV | None]:
    done: Future[ChunkKV | None] = Future()
    done.set_result(kv)
    return done


def _or_else(found: Future[ChunkKV | None], build: Callable[[], Future[ChunkKV]]) -> Future[ChunkKV]:
    """What was found, or what is built once it turns out that nothing was."""
    result: Future[ChunkKV] = Future()

    def pass_on(built: Future[ChunkKV]) -> None:
        error = built.exception()
        if error is None:
            result.set_result(built.result())
        else:
            result.set_exception(error)

    def decide(found: Future[ChunkKV | None]) -> None:
        kv = found.result()
        try:
            if kv is None:
                build().add_done_callback(pass_on)
            else:
                result.set_result(kv)
        except Exception as error:
            result.set_exception(error)

    found.add_done_callback(decide)
    return result


@contextmanager
def asking(policy: Policy) -> Iterator[None]:
    """What a policy raises becomes a KVLinkerError that names it."""
    try:
        yield
    except KVLinkerError:
        raise
    except Exception as error:
        logger.exception("Policy %s failed.", policy.name)
        raise KVLinkerError(f"Policy {policy.name} failed: {error}") from error


def _plan_with_scores(prompt: Prompt, policy: Policy, forecast: Forecast | None, kvs: tuple[ChunkKV, ...]) -> Link:
    """Plan once the KV of all chunks is at hand, and their scores with it."""
    evidence = PromptEvidence(tuple(kv.scores for kv in kvs))
    with asking(policy):
        plan = probe_plan(prompt, policy) if policy.probes else make_plan(prompt, policy, evidence)
    at = {span.start: kv for span, kv in zip(prompt.spans, kvs, strict=True)}
    return Link(plan, tuple(at[placement.start] for placement in plan.placements), evidence, forecast)
