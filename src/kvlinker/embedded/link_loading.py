"""From a request to what the engine computes: its chunks' KV fetched, and the plan made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvlinker.embedded.chunk_builder import ChunkBuilder
from kvlinker.embedded.throughput import Pace
from kvlinker.embedded.variants import VariantLibrary
from kvlinker.engine.contract import GenerationRequest
from kvlinker.futures import gather
from kvlinker.linking.evidence import Forecast
from kvlinker.linking.link import Link
from kvlinker.linking.refinement import Refinement
from kvlinker.prompt.segments import Prompt
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.loading.bandwidth import LoadTime
from kvlinker.types.chunks import Chunk, chunk_key


@dataclass(frozen=True, slots=True)
class LoadedLink:
    """A link with a plan, and the KV of its ``chunks``."""

    link: Link
    kvs: tuple[ChunkKV, ...]


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

    def link(self, request: GenerationRequest, *, at_hand: bool = False) -> Future[LoadedLink]:
        """Fetch what the request's policy needs; layers of it may still be on their way (see ``ChunkStore.load``).

        ``at_hand``: what is not in memory is computed, whatever slower tiers have. Raises KVLinkerError when the policy
        fails; later errors are the future's.
        """
        tenant = request.tenant
        link = Link.begin(
            request.prompt,
            request.policy,
            library=None if self._variants is None else self._variants.of(tenant),
            forecast=partial(self._forecast, tenant=tenant, at_hand=at_hand),
        )
        if link.plan is not None and link.forecast is not None and link.forecast.load != 0:
            rest = [chunk for chunk in link.prompt.chunks if chunk not in link.chunks]
            self._store.load_ahead(self._keys(rest, tenant))
        fetched = self._fetch(
            link.chunks, tenant=tenant, computed=link.computed, at_hand=at_hand, forecast=link.forecast
        )
        return gather(fetched, lambda kvs: LoadedLink(link.with_scores([kv.scores for kv in kvs]), kvs))

    def note_use(self, request: GenerationRequest, link: Link, refinement: Refinement | None) -> None:
        """The request's prompt has been computed by this link. To be told once."""
        for use in link.uses(self._layers, refinement):
            key = chunk_key(use.chunk, fingerprint=self._fingerprint, tenant=request.tenant)
            self._store.note_use(key, use.recomputed)
            if self._variants is not None and use.chunk not in request.prompt.chunks:
                self._variants.note_use(key, use.recomputed)

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
