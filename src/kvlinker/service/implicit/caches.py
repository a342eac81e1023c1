"""Makes marked texts, documents and recognised passages chunks, for ``ContentReader``.

``encode`` makes the ``Chunk`` of a text, its token ids; ``find`` and ``use`` find its context cache
in the catalog by content, or enter one. No KV is taken from the request that contains the text:
like that of an evicted chunk, it is missing in the store when the prompt is loaded, and is then
computed alone (``PromptLoader``). Other requests for it wait for the same computation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Literal, NamedTuple

from kvlinker.base.errors import CatalogUnavailableError, InvalidRequestError
from kvlinker.base.events import ChunkNamed, Events, ImplicitText
from kvlinker.base.types.chunks import Chunk, salted
from kvlinker.base.types.messages import MarkedText, TextSource
from kvlinker.base.types.residency import lines_of, text_name
from kvlinker.engines.contract.contract import Engine
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.service.context_caches.creation import Creation
from kvlinker.store import Catalog, ContextCache

logger = logging.getLogger(__name__)

TOKENS_AROUND = 64
"""The tokens of the context window that an implicit chunk leaves to the prompt around it."""

NAMED_LINES = 16
"""The lines by which a text is known that was recognised: its first ones, as a request has all of
them or none."""

SLACK = 0.01
"""The share of its time to live that a context cache may have lost before a use is written down
again."""


class FoundChunk(NamedTuple):
    """Holds the chunk of a text, and the context cache that has it."""

    chunk: Chunk
    cache: ContextCache

    created: bool
    """True if this call entered the context cache."""


class ImplicitCaches:
    """Finds or enters context caches for texts, each tenant's apart. Methods may be called from any
    thread."""

    def __init__(
        self,
        builder: PromptBuilder,
        engine: Engine,
        creation: Creation,
        catalog: Catalog,
        events: Events,
        *,
        ttl: float,
    ) -> None:
        """``ttl``: the seconds that an implicit context cache lives from its last use."""
        self._builder = builder
        self._engine = engine
        self._creation = creation
        self._catalog = catalog
        self._events = events
        self._ttl = ttl

    def encode(self, text: str, salt: str = "") -> Chunk | None:
        """Return the chunk of a text in requests with this salt; None if it can be none: it is
        empty, too long, or spells special tokens that the tokenizer cannot write as text."""
        if not text:
            return None
        try:
            chunk = replace(self._builder.encode_chunk(text), salt=salt, scored=False)
        except InvalidRequestError:
            return None
        fits = len(chunk.prefix) + len(chunk) + TOKENS_AROUND <= self._engine.max_model_len
        return chunk if fits else None

    def find(self, chunks: Sequence[Chunk], *, tenant: str) -> dict[Chunk, FoundChunk]:
        """Return those of the chunks, which have one salt, that have context caches, the tenant's
        own or shared ones; one whose KV was computed in another context stands for its text, too.
        There are none while the catalog does not answer."""
        if not chunks:
            return {}
        fingerprint = salted(self._engine.fingerprint, chunks[0].salt)
        try:
            known = self._catalog.implicit.find(
                {chunk.content for chunk in chunks}, tenant, fingerprint, time.time()
            )
        except CatalogUnavailableError as error:
            logger.warning("Texts are computed without their chunks: %s", error.message)
            return {}
        found = {}
        for chunk in chunks:
            if caches := known.get(chunk.content):
                best = min(caches, key=lambda cache: _rank(cache, chunk))
                found[chunk] = FoundChunk(best.chunk, best, created=False)
        return found

    def use(
        self,
        texts: Mapping[Chunk, MarkedText],
        known: Mapping[Chunk, FoundChunk],
        *,
        tenant: str,
    ) -> dict[Chunk, FoundChunk]:
        """Return the chunks with their context caches: those that ``find`` has returned, ``known``,
        live on, and others are entered.

        A chunk for which there is no room is missing in the result; so are all while the catalog
        does not answer, and their texts are computed.
        """
        try:
            found = self._entered(texts, known, tenant)
        except CatalogUnavailableError as error:
            logger.warning("Texts are computed without their chunks: %s", error.message)
            found = {}
        for chunk, each in found.items():
            names = _names_of(texts[chunk], tenant)
            self._events.publish(ChunkNamed(each.cache.chunk_key, names, each.cache.tenant))
        for chunk, text in texts.items():
            outcome: Literal["hit", "created", "refused"] = "hit"
            if chunk not in found or found[chunk].created:
                outcome = "created" if chunk in found else "refused"
            self._events.publish(ImplicitText(text.source, outcome))
        return found

    def extend(self, caches: Mapping[ContextCache, float | None]) -> None:
        """Note a use of context caches, of which the implicit ones live on: for the seconds that
        are given, or as long as they lived so far."""
        now = time.time()
        lives = {}
        for cache, wanted in caches.items():
            if cache.implicit_ttl is not None and cache.expires_at is not None:
                ttl = max(cache.implicit_ttl, wanted or 0.0)
                if now + ttl - cache.expires_at > ttl * SLACK:
                    lives[cache.id] = ttl
        if lives:
            self._catalog.implicit.extend(lives, now)

    def _entered(
        self, texts: Mapping[Chunk, MarkedText], known: Mapping[Chunk, FoundChunk], tenant: str
    ) -> dict[Chunk, FoundChunk]:
        found = {chunk: known[chunk] for chunk in texts if chunk in known}
        self.extend({each.cache: texts[chunk].ttl for chunk, each in found.items()})
        kept = {each.cache.id for each in found.values()}
        new = {chunk: text.ttl or self._ttl for chunk, text in texts.items() if chunk not in found}
        if new:
            entered = self._creation.enter_implicit(new, owner=tenant, kept=kept)
            for chunk, (cache, created) in entered.items():
                found[chunk] = FoundChunk(cache.chunk, cache, created)
        return found


def _names_of(text: MarkedText, tenant: str) -> tuple[str, ...]:
    """Return the names by which routers may know a text: one that was recognised within another, by
    its lines."""
    if text.source is TextSource.RECOGNITION:
        return tuple(text_name(line, tenant) for line in islice(lines_of(text.text), NAMED_LINES))
    return (text_name(text.text, tenant),)


def _rank(cache: ContextCache, wanted: Chunk) -> tuple[bool, bool, bool]:
    """Order the context caches of one text: the smallest is the best to use."""
    return cache.chunk.prefix != wanted.prefix, cache.chunk.shared, cache.implicit_ttl is not None
