"""Makes marked texts, documents, recognised passages and pieces chunks, for ``ContentReader``.

``encode`` makes the ``Chunk`` of a text, and ``within`` that of token ids in a prompt; ``find`` and
``use`` find its context cache in the catalog by content, or enter one. No KV is taken from the
request that contains the text: like that of an evicted chunk, it is missing in the store when the
prompt is loaded, and is then computed behind its own context (``PromptLoader``), apart from the
request's prompt. Other requests for it wait for the
same computation.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice, takewhile
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

EDGE_TOKENS = 4
"""The tokens at each end of a text, less one, that may be others within a prompt: punctuation, and
the white space and letters that are joined with it."""

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


class Part(NamedTuple):
    """The tokens of a chunk that agree with those that its text has in a prompt."""

    whole: FoundChunk
    first: int
    """The index in the chunk of the first token that agrees."""

    skipped: int
    """The tokens of the text in the prompt before that one."""

    chunk: Chunk
    """The tokens that agree, as a chunk whose KV is that of the whole one."""


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
            return self._fit(self._builder.encode_chunk(text), salt)
        except InvalidRequestError:
            return None

    def within(self, ids: Sequence[int], salt: str = "") -> Chunk | None:
        """Return the chunk of token ids that stand within a prompt; None if they are none, or too
        many."""
        return self._fit(self._builder.chunk_within(ids), salt) if ids else None

    def _fit(self, chunk: Chunk, salt: str) -> Chunk | None:
        fits = len(chunk.prefix) + len(chunk) + TOKENS_AROUND <= self._engine.max_model_len
        return replace(chunk, salt=salt, scored=False) if fits else None

    def find(self, chunks: Sequence[Chunk], *, tenant: str) -> dict[Chunk, FoundChunk]:
        """Return those of the chunks, which have one salt, that have context caches, the tenant's
        own or shared ones; one whose KV was computed in another context stands for its text, too.
        There are none while the catalog does not answer."""
        if not chunks:
            return {}
        fingerprint = salted(self._engine.fingerprint, chunks[0].salt)
        try:
            contents = [chunk.content for chunk in chunks]
            known = self._catalog.implicit.find(set(contents), tenant, fingerprint, time.time())
        except CatalogUnavailableError as error:
            logger.warning("Texts are computed without their chunks: %s", error.message)
            return {}
        found = {}
        for chunk, content in zip(chunks, contents, strict=True):
            caches = known.get(content, ())
            if len(caches) > 1:
                caches = sorted(caches, key=lambda cache: _rank(cache, chunk))
            if caches:
                found[chunk] = FoundChunk(caches[0].chunk, caches[0], created=False)
        return found

    def find_part(
        self, text: str, ids: Sequence[int], *, salt: str = "", tenant: str
    ) -> Part | None:
        """Return the part of a text's chunk that agrees with ``ids``, which are those of the text
        in a prompt: behind other texts, and before them, a text may have other tokens at its edges.
        None if it has no context cache, or other tokens within."""
        wanted = self.encode(text, salt)
        known = {} if wanted is None else self.find([wanted], tenant=tenant)
        if wanted not in known:
            return None
        whole = known[wanted]
        tokens = whole.chunk.tokens
        edges = [(one, other) for one in range(EDGE_TOKENS) for other in range(EDGE_TOKENS)]
        for first, skipped in sorted(edges, key=sum):
            pairs = zip(tokens[first:], ids[skipped:], strict=False)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            behind = max(len(tokens) - first, len(ids) - skipped) - count
            if behind < EDGE_TOKENS < count:
                chunk = replace(
                    whole.chunk,
                    tokens=tokens[first : first + count],
                    prefix=(*whole.chunk.prefix, *tokens[:first]),
                    shared=False,
                )
                return Part(whole, first, skipped, chunk)
        return None

    def keep_part(self, part: Part, text: str, *, tenant: str) -> FoundChunk | None:
        """Return the context cache of a part, entered with the KV of the whole chunk; None if that
        cannot be divided or is gone, or if there is no room."""
        try:
            cache = self._creation.keep_part(
                part.chunk,
                part.whole.cache.chunk_key,
                part.first,
                text=text,
                owner=tenant,
                ttl=self._ttl,
            )
        except CatalogUnavailableError as error:
            logger.warning("A text is computed without its chunk: %s", error.message)
            return None
        if cache is None:
            return None
        self._events.publish(ImplicitText(TextSource.RECOGNITION, "created"))
        return FoundChunk(cache.chunk, cache, created=True)

    def use(
        self,
        texts: Mapping[Chunk, MarkedText],
        known: Mapping[Chunk, FoundChunk],
        *,
        tenant: str,
        kept: Collection[str] = (),
    ) -> dict[Chunk, FoundChunk]:
        """Return the chunks with their context caches: those that ``find`` has returned, ``known``,
        live on, and others are entered, but not in the places of the ids in ``kept``.

        A chunk for which there is no room is missing in the result; so are all while the catalog
        does not answer, and their texts are computed.
        """
        try:
            found = self._enter_missing(texts, known, tenant, kept)
        except CatalogUnavailableError as error:
            logger.warning("Texts are computed without their chunks: %s", error.message)
            found = {}
        for chunk, text in texts.items():
            outcome: Literal["hit", "created", "refused"] = "refused"
            if (each := found.get(chunk)) is not None:
                outcome = "created" if each.created else "hit"
                names = _names_of(text, tenant)
                self._events.publish(ChunkNamed(each.cache.chunk_key, names, each.cache.tenant))
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

    def _enter_missing(
        self,
        texts: Mapping[Chunk, MarkedText],
        known: Mapping[Chunk, FoundChunk],
        tenant: str,
        kept: Collection[str],
    ) -> dict[Chunk, FoundChunk]:
        found: dict[Chunk, FoundChunk] = {}
        lives: dict[ContextCache, float | None] = {}
        new: dict[Chunk, float] = {}
        for chunk, text in texts.items():
            if (each := known.get(chunk)) is None:
                new[chunk] = text.ttl or self._ttl
            else:
                found[chunk] = each
                lives[each.cache] = text.ttl
        self.extend(lives)
        if new:
            kept = {*kept, *(each.cache.id for each in found.values())}
            entered = self._creation.enter_implicit(new, owner=tenant, kept=kept)
            for chunk, (cache, created) in entered.items():
                found[chunk] = FoundChunk(cache.chunk, cache, created)
        return found


def _names_of(text: MarkedText, tenant: str) -> tuple[str, ...]:
    """Return the names by which routers may know a text: one that was found within another, by its
    lines."""
    if text.source in (TextSource.RECOGNITION, TextSource.STRUCTURE):
        return tuple(text_name(line, tenant) for line in islice(lines_of(text.text), NAMED_LINES))
    return (text_name(text.text, tenant),)


def _rank(cache: ContextCache, wanted: Chunk) -> tuple[bool, bool, bool]:
    """Order the context caches of one text: the smallest is the best to use."""
    return cache.chunk.prefix != wanted.prefix, cache.chunk.shared, cache.implicit_ttl is not None
