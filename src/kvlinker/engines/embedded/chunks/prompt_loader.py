"""Fetches the KV of chunks for the requests that link it, computes those that the store lacks, and
notes their use."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.futures import completed, fall_back, follow_up, gather
from kvlinker.base.types.chunk_scores import SCORE_BYTES_PER_TOKEN
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.contract.elsewhere import Elsewhere
from kvlinker.engines.contract.places import TenantLibrary
from kvlinker.engines.embedded.chunks.builder import ChunkBuilder
from kvlinker.engines.embedded.chunks.variants import VariantBuilder
from kvlinker.engines.embedded.kv_cache.spilling import compute_seconds
from kvlinker.engines.embedded.model.anatomy import keeping
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.generation import PromptRequest
from kvlinker.engines.embedded.requests.request import RequestState
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.engines.embedded.scheduling.throughput import ComputeThroughput
from kvlinker.linking.evidence import Forecast
from kvlinker.linking.link import Link, no_reuse
from kvlinker.linking.policy import Policy
from kvlinker.linking.refinement import Refinement
from kvlinker.prompting.segments import Prompt, ReusedPrefix, StoredKV
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import LayerKV
from kvlinker.store.loading.arriving import KV, ArrivingKV
from kvlinker.store.loading.bandwidths import LoadTime
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.prefixes import SpilledPrefixes

logger = logging.getLogger(__name__)


class PromptLoader:
    """Begins the links of requests and fetches the KV of their chunks. Methods may be called from
    any thread."""

    def __init__(
        self,
        loaded: LoadedModel,
        store: ChunkStore,
        scheduler: Scheduler,
        builder: ChunkBuilder,
        throughput: ComputeThroughput,
        *,
        variants: VariantBuilder | None,
        prefixes: SpilledPrefixes | None,
        elsewhere: Elsewhere | None,
        restored: Callable[[int], object],
    ) -> None:
        """``builder`` computes chunks that the store lacks; ``throughput`` predicts how long
        computing takes. ``variants`` is offered prompts, some of whose variants may be missing.
        ``prefixes`` has the KV
        that was evicted from the pool; ``restored`` is called with the number of tokens whose KV
        was read from there. ``elsewhere`` is asked for chunks before they are computed here."""
        self._fingerprint = loaded.fingerprint
        self._token_bytes = loaded.kv_bytes_per_token
        self._keeps_states = bool(loaded.anatomy.recurrences)
        # Without states, a chunk's bytes are those of its tokens.
        self._kv_bytes = loaded.kv_bytes if self._keeps_states else self._token_bytes.__mul__
        self._layers = max(1, len(loaded.layers))
        self._shapes = [each.parts for each in keeping(loaded.layers)]
        self._are_states_of = loaded.are_states_of
        self._store = store
        self._scheduler = scheduler
        self._builder = builder
        self._throughput = throughput
        self._variants = variants
        self._prefixes = prefixes
        self._elsewhere = elsewhere
        self._restored = restored

    def keys(self, chunks: Sequence[Chunk], tenant: str) -> list[str]:
        """Return the keys of a tenant's chunks."""
        return [chunk_key(chunk, fingerprint=self._fingerprint, tenant=tenant) for chunk in chunks]

    def name_chunks(self, request: PromptRequest) -> None:
        """Set the keys and the bytes of the chunks that the request's prompt names."""
        chunks = request.request.prompt.chunks
        keys = self.keys(chunks, request.tenant)
        request.keys = dict(zip(map(id, chunks), keys, strict=True))
        request.chunk_bytes = self._sizes(keys, chunks)

    def _sizes(self, keys: Sequence[str], chunks: Sequence[Chunk]) -> dict[str, int]:
        """Return the bytes of the chunks in memory, KV and scores, by key."""
        sizes = {}
        for key, chunk in zip(keys, chunks, strict=True):
            tokens = len(chunk.tokens)
            sizes[key] = self._kv_bytes(tokens) + tokens * SCORE_BYTES_PER_TOKEN
        return sizes

    def _keys_of(self, request: PromptRequest, chunks: Sequence[Chunk]) -> list[str]:
        """Return the keys of chunks that a policy chose for the request's prompt, most of which it
        names itself."""
        return [
            request.keys.get(id(chunk))
            or chunk_key(chunk, fingerprint=self._fingerprint, tenant=request.tenant)
            for chunk in chunks
        ]

    def load(self, request: PromptRequest) -> None:
        """Begin the request's link and fetch the KV of its chunks.

        The plan, which may be that of a first pass, is made before the fetch. Where the policy
        looks at scores, the thread that gets the last chunk makes it. That thread reports to the
        scheduler, maybe while layers still arrive. For a request that has ended, nothing is begun.
        """
        try:
            _check_wanted(request)
            link = self._begin(request)
            keys, reused = self._keys_of(request, link.chunks), link.prompt.reused
            stored = () if reused is None else reused.stored
            hold = request.hold
            if hold is not None:  # else the request has ended meanwhile
                if not hold.keys.issuperset(keys):
                    hold.extend(self._sizes(keys, link.chunks))
                if stored:
                    hold.extend({part.key: part.last * self._token_bytes for part in stored})
            restoring = self._restore(link, stored) if stored else ()
            fetched = self._fetch(request, link, keys)
            kvs = [kv for kv in fetched if not isinstance(kv, Future)]
            if len(kvs) == len(fetched) and not restoring:
                self._complete(request, link, (kvs, []))
                return
            loading = [kv if isinstance(kv, Future) else completed(kv) for kv in fetched]
            done = gather(
                [gather(loading, list), gather(restoring, list)],
                partial(self._complete, request, link),
            )
        except Exception as error:
            self._fail(request, error)
        else:
            done.add_done_callback(lambda done: self._fail(request, done.exception()))

    def note_use(
        self, request: GenerationRequest, link: Link, refinement: Refinement | None
    ) -> None:
        """Report to the store the share of each chunk that a request has computed again. To be
        called once per request."""
        for use in link.uses(self._layers, refinement):
            key = chunk_key(use.chunk, fingerprint=self._fingerprint, tenant=request.tenant)
            self._store.note_use(key, use.recomputed)
            is_variant = not use.chunk.place and use.chunk not in request.prompt.chunks
            if self._variants is not None and is_variant:
                self._variants.library.note_use(key, use.recomputed)

    def _begin(self, request: PromptRequest) -> Link:
        wanted = request.request
        return Link.begin(
            wanted.prompt,
            wanted.policy,
            library=TenantLibrary(
                self._store,
                self._fingerprint,
                wanted.tenant,
                None if self._variants is None or wanted.salt else self._variants.library.variants,
            ),
            forecast=partial(self._forecast, request),
            reuse=partial(self._reuse, request) if request.reuses else no_reuse,
        )

    def _reuse(self, request: PromptRequest, prompt: Prompt, policy: Policy) -> ReusedPrefix | None:
        """Return the beginning of the request's prompt that was computed before in the same
        way."""
        keys = self._keys_of(request, prompt.chunks)
        return self._scheduler.find_prefix(request.request.sharer, prompt, keys, policy)

    def _restore(self, link: Link, stored: Sequence[StoredKV]) -> list[Future[KV | None]]:
        """Load the KV that the link reuses from disk."""
        if self._prefixes is None:
            return [completed(None) for _ in stored]
        own = link.prompt.reused_own[-sum(map(len, stored)) :]
        return self._prefixes.load(
            [part.key for part in stored], compute_seconds(self._throughput.seconds, own)
        )

    def _fetch(
        self, request: PromptRequest, link: Link, keys: Sequence[str]
    ) -> list[KV | Future[KV]]:
        """Fetch the KV of the link's chunks, whose ``keys`` these are: of all of them, if the
        forecast says that loading pays. It is returned where it is in memory. Chunks that the plan
        computes instead, by its forecast, are read to memory for later prompts."""
        forecast = link.forecast
        if link.plan is not None and forecast is not None and forecast.load != 0:
            others = [chunk for chunk in link.prompt.chunks if chunk not in link.chunks]
            self._store.load_ahead(self._keys_of(request, others))
        chunks = link.chunks
        found = [self._store.get_resident(key) for key in keys]
        loading: dict[int, Future[KV | None]] = {}
        absent = [index for index, kv in enumerate(found) if kv is None]
        if absent and not request.resident_only:
            urgency = self._throughput.urgency(
                link.computed,
                cached=sum([len(chunks[index].tokens) for index in absent]),
                decided=forecast is not None and forecast.worth_loading,
                alone=self._scheduler.is_alone(request),
            )
            loads = self._store.load([keys[index] for index in absent], urgency)
            loading = dict(zip(absent, loads, strict=True))
        fetched: list[KV | Future[KV]] = []
        for index, (kv, key, chunk) in enumerate(zip(found, keys, chunks, strict=True)):
            if kv is not None and self._is_enough(link, chunk, kv):
                fetched.append(kv)
                continue
            obtain = partial(self._obtain, request, link, key, chunk)
            accepts = partial(self._is_enough, link, chunk)
            first: Future[KV | None] = loading[index] if index in loading else completed(kv)
            fetched.append(fall_back(first, obtain, accepts))
        return fetched

    def _is_enough(self, link: Link, chunk: Chunk, kv: KV) -> bool:
        """Return whether the KV is the chunk's, and has the scores that the link's policy needs.
        That of a text without an id may have been stored without scores."""
        if kv.scores is None and link.policy.needs.scores and self._builder.collects_scores:
            return False
        return self._fits(chunk, kv)

    def _fits(self, chunk: Chunk, kv: KV) -> bool:
        """Return whether the KV has the shape that the forward pass takes for granted, as far as
        its layers are there."""
        tokens = kv.tokens
        layers: Sequence[LayerKV | None]
        if isinstance(kv, ArrivingKV):
            layers = [kv.layer(index) for index in range(kv.layer_count)]
        else:
            layers = kv.layers
        if tokens != len(chunk.tokens) or len(layers) != len(self._shapes):
            return False
        for layer, (key, value, *index) in zip(layers, self._shapes, strict=True):
            if layer is None:
                continue
            if layer.key.shape != (key[0], tokens, key[1]):
                return False
            if layer.value.shape != (value[0], tokens, value[1]):
                return False
            indexed = None if layer.index is None else layer.index.shape
            if indexed != ((index[0][0], tokens, index[0][1]) if index else None):
                return False
        return self._are_states_of(tokens, kv.states) if self._keeps_states else not kv.states

    def _obtain(
        self, request: PromptRequest, link: Link, key: str, chunk: Chunk, stored: KV | None
    ) -> Future[KV]:
        """Obtain a chunk that the store lacks: computed elsewhere and loaded, where that pays, else
        computed here. Raises the errors of ``_build``."""
        build = partial(self._build, request, link, key, chunk)
        lacking = link.policy.needs.scores and not chunk.scored  # another would compute none
        if self._elsewhere is None or stored is not None or request.resident_only or lacking:
            return build(stored)
        _check_wanted(request)
        seconds = self._throughput.prefill_seconds(len(chunk))
        asked = self._elsewhere.ask(key, len(chunk), seconds)
        if asked is None:
            return build(None)

        def load(there: bool) -> Future[KV | None]:
            return self._store.load([key], Urgency())[0] if there else completed(None)

        accepts = partial(self._is_enough, link, chunk)
        return fall_back(follow_up(asked, load), build, accepts=accepts)

    def _build(
        self, request: PromptRequest, link: Link, key: str, chunk: Chunk, stored: KV | None
    ) -> Future[KV]:
        """Compute the chunk, which the store lacks, has without the scores that are needed, or has
        in another shape. Raises KVLinkerError if the request has ended while the store looked for
        it."""
        if isinstance(stored, ArrivingKV):
            stored.give_up()
        if stored is not None and not self._fits(chunk, stored):
            logger.error(
                "The KV stored as chunk %s is of another text or model: it is computed anew. Who"
                " else writes to this store?",
                key,
            )
            self._store.delete(key)
        _check_wanted(request)
        with_scores = chunk.scored or link.policy.needs.scores
        if chunk.place:  # it was evicted since the policy chose it
            chunk = chunk.at_place(0)
            (key,) = self.keys([chunk], request.tenant)
        building = self._builder.build(
            key, chunk, tenant=request.request.tenant, urgent=True, with_scores=with_scores
        )
        if building.begun:
            request.made.add(chunk)
        return gather([building.kvs], lambda built: built[0][0])

    def _complete(
        self, request: PromptRequest, begun: Link, loaded: tuple[list[KV], list[KV | None]]
    ) -> None:
        """Hand the request over to the scheduler with the fetched KV. If the scheduler does not
        take it, because it has ended or its policy fails, the layers that still arrive are
        dropped."""
        kvs, restored = loaded
        taken = False
        try:
            request.link = link = begun.with_scores([kv.scores for kv in kvs])
            keys = self._keys_of(request, link.prompt.chunks)
            taken = self._scheduler.loaded(
                request, request.make_sequence(link, kvs, keys, restored)
            )
        finally:
            if not taken:
                request.link = None
                for arriving in (kv for kv in kvs if isinstance(kv, ArrivingKV)):
                    arriving.give_up()
        if not taken:
            return
        if link.prompt.reused is not None:
            parts = zip(link.prompt.reused.stored, restored, strict=True)
            if tokens := sum(len(part) for part, kv in parts if kv is not None):
                self._restored(tokens)
        wants_variants = link.policy.needs.variants and not request.explains
        if self._variants is not None and wants_variants and not request.request.salt:
            self._variants.offer(link.prompt, request.request.tenant)

    def _fail(self, request: PromptRequest, error: BaseException | None) -> None:
        if error is None:
            return
        if not isinstance(error, KVLinkerError):
            logger.error("Loading a request's chunks failed.", exc_info=error)
            error = KVLinkerError("The request's chunks could not be loaded; see the server's log.")
        self._scheduler.failed(request, error)

    def _forecast(self, request: PromptRequest, prompt: Prompt) -> Forecast:
        load: LoadTime | None = LoadTime()
        if not request.resident_only:
            load = self._store.load_time(self._keys_of(request, prompt.chunks))
        prefill = self._throughput.prefill_seconds(int(prompt.cached.sum()))
        if load is None:
            return Forecast(None, prefill)
        return Forecast(load.seconds, prefill, overlaps=load.waits or not self._throughput.on_host)


def _check_wanted(request: PromptRequest) -> None:
    """Raise KVLinkerError if the request has ended: its chunks are no longer needed."""
    if request.state is RequestState.FINISHED:
        raise KVLinkerError("The request has ended before its chunks were there.")
