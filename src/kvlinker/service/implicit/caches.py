"""Makes marked texts, documents, recognised passages and pieces chunks, for ``ContentReader``.

``encode`` makes the ``Chunk`` of a text, and ``within`` that of token ids in a prompt; ``find`` and
``use`` find its context cache in the catalog by content, or enter one. No KV is taken from the
request that contains the text: like that of an evicted chunk, it is missing in the store when the
prompt is loaded, and is then computed behind its own context (``PromptLoader``), apart from the
request's prompt. Other requests for it wait for the
same computation.

``Recognizer`` finds parts of a prompt's texts that are worth a chunk: texts of known chunks, and
repeated passages. The cuts in a text depend on the passages themselves, not on the text before
them, so frameworks may join retrieved texts as they like. Nothing is taken on a hash's word: what
becomes a chunk is the text itself, with the token ids that it has in the prompt.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice, pairwise, takewhile
from typing import Literal, NamedTuple

from kvlinker.base.errors import CatalogUnavailableError, InvalidRequestError
from kvlinker.base.events import AnswerKept, ChunkNamed, Event, Events, ImplicitText
from kvlinker.base.types.chunks import Chunk, salted
from kvlinker.base.types.messages import MarkedText, TextSource
from kvlinker.base.types.residency import lines_of, text_name
from kvlinker.engines.contract.contract import Engine
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.segments import Passage, PromptText, Span
from kvlinker.service.context_caches.creation import Creation
from kvlinker.service.implicit.known import WINDOW, KnownTexts, WindowHash
from kvlinker.service.implicit.seen_lines import (
    LEAST_CHARACTERS,
    MOST_SIGHTS,
    Line,
    RecentDigests,
    SeenLines,
    paragraphs,
    units_of,
)
from kvlinker.store import Catalog, ContextCache

logger = logging.getLogger(__name__)

TOKENS_AROUND = 64
"""The tokens of the context window that an implicit chunk leaves to the prompt around it."""

EDGE_TOKENS = 4
"""The tokens at each end of a text, less one, that may be others within a prompt: punctuation, and
the white space and letters that are joined with it."""

MOST_NAMED = 4096
"""The chunks whose names are not published again: those that were named last. A small part of those
that listeners remember; chosen by hand."""

NAMED_LINES = 16
"""The lines by which a text is known that was recognised: its first ones, as a request has all of
them or none."""

SLACK = 0.01
"""The share of its time to live that a context cache may have lost before a use is written down
again."""

MOST_TENANTS = 64
"""The most tenants, each salt of theirs apart, whose texts are remembered; of the others, those
that asked longest ago are forgotten."""

LOOK_SECONDS = 60.0
"""The seconds after which the catalog is asked again which tenants have kept answers. Chosen by
hand."""

MOST_BEGINNINGS = 16_384
"""The most beginnings of prompts, each up to the end of a line, that are remembered of one
tenant."""

MOST_LOADED = 2048
"""The most chunks that are read from the catalog at once; of more, the newest."""

PART_END = "\0"
"""Stands after each section of a prompt in what is hashed of it."""


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
        self._naming = threading.Lock()
        self._named: OrderedDict[tuple[str, str, TextSource], None] = OrderedDict()

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
                self._name(each.cache, text, tenant)
            self._events.publish(ImplicitText(text.source, outcome))
        return found

    def _name(self, cache: ContextCache, text: MarkedText, tenant: str) -> None:
        """Publish the names of a context cache's chunk, unless this was done lately."""
        naming = (cache.chunk_key, tenant, text.source)
        with self._naming:
            if naming in self._named:
                return
            self._named[naming] = None
            if len(self._named) > MOST_NAMED:
                self._named.popitem(last=False)
        self._events.publish(ChunkNamed(cache.chunk_key, _names_of(text, tenant), cache.tenant))

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


class Recognised(NamedTuple):
    """Passages in the texts of one prompt, in order."""

    chunks: Sequence[Passage]
    """Known texts, and passages that come again."""

    new: Sequence[Passage] = ()
    """Paragraphs that are seen for the first time."""


class Recognizer:
    """Finds texts in prompts that are to be chunks. Methods may be called from any thread."""

    def __init__(
        self, catalog: Catalog, encoder: TextEncoder, events: Events, *, fingerprint: str
    ) -> None:
        self._catalog = catalog
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._windows = WindowHash()
        self._lock = threading.Lock()  # guards the tenants, not what each of them has
        self._tenants: OrderedDict[tuple[str, str], _TenantTexts] = OrderedDict()
        self._keeping: set[str] = set()  # tenants with kept answers
        self._looked_at = -math.inf
        self._look()
        events.subscribe(self._listen, AnswerKept)

    def read(
        self,
        prompt_texts: Sequence[PromptText],
        *,
        tenant: str,
        salt: str = "",
        notes: bool = True,
    ) -> Recognised:
        """Find known texts, and passages that come again in requests with this salt; remember all
        others.

        The common beginning of a prompt and an earlier one does not count as repeated: it is reused
        as it was computed. Without ``notes``, nothing is remembered.
        """
        texts = self._texts_of(tenant, salt)
        with texts.lock:
            with suppress(CatalogUnavailableError):  # what is known already is recognised
                self._load(texts, tenant, salt)
            reading = _Reading(texts)
            reading.read(prompt_texts)
            if notes:
                texts.remember(reading)
            return Recognised(reading.found, reading.paragraphs if notes else ())

    def notice(
        self, prompt_texts: Sequence[PromptText], *, tenant: str, salt: str = ""
    ) -> Sequence[Passage]:
        """Return the passages that ``read`` would find to come again, and remember all texts. The
        catalog is not asked for known texts."""
        texts = self._texts_of(tenant, salt)
        with texts.lock:
            reading = _Reading(texts)
            reading.read(prompt_texts)
            texts.remember(reading)
            return reading.found

    def keeps_answers(self, tenant: str) -> bool:
        """Return whether the tenant has kept answers. Those that another server kept may be missed
        for a minute."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._look()
        return tenant in self._keeping

    def find_answers(
        self, prompt_texts: Sequence[PromptText], *, tenant: str, salt: str = ""
    ) -> Recognised:
        """Find the texts of kept answers, and no others."""
        texts = self._texts_of(tenant, salt)
        with texts.lock:
            with suppress(CatalogUnavailableError):
                texts.answers_loaded, chunks = self._catalog.implicit.tokens_since(
                    texts.answers_loaded,
                    tenant,
                    salted(self._fingerprint, salt),
                    limit=MOST_LOADED,
                    answers=True,
                )
                for tokens in chunks:
                    text = self._encoder.decode_data(tokens)
                    with suppress(InvalidRequestError):  # it cannot be written as text
                        if self._encoder.encode_data(text) == tokens:  # as in another prompt
                            texts.answers.add(text)
            return Recognised(
                [
                    Passage(each, *span)
                    for each in prompt_texts
                    for span in texts.answers.find(each.text)
                ]
            )

    def seen_before(
        self, contents: Sequence[str], *, tenant: str, salt: str = "", notes: bool = True
    ) -> frozenset[str]:
        """Return which of these contents of pieces came in an earlier request with this salt, and
        remember all of them; without ``notes``, none."""
        texts = self._texts_of(tenant, salt)
        with texts.lock:
            digests = [bytes.fromhex(content) for content in contents]
            seen = frozenset(each.hex() for each in digests if each in texts.pieces)
            if notes:
                texts.pieces.add(digests)
            return seen

    def _listen(self, event: Event) -> None:
        """Take note of tenants that keep answers."""
        if isinstance(event, AnswerKept):
            self._keeping.add(event.tenant)

    def _look(self) -> None:
        """Ask the catalog which tenants have kept answers."""
        self._looked_at = time.monotonic()
        with suppress(CatalogUnavailableError):
            self._keeping |= self._catalog.implicit.tenants_with_answers()

    def _texts_of(self, tenant: str, salt: str) -> _TenantTexts:
        asking = (tenant, salt)
        with self._lock:
            texts = self._tenants.get(asking) or _TenantTexts(self._windows)
            self._tenants[asking] = texts
            self._tenants.move_to_end(asking)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
            return texts

    def _load(self, texts: _TenantTexts, tenant: str, salt: str) -> None:
        """Load the texts of all chunks that the catalog has of the tenant by now."""
        texts.loaded, chunks = self._catalog.implicit.tokens_since(
            texts.loaded, tenant, salted(self._fingerprint, salt), limit=MOST_LOADED
        )
        for tokens in chunks:
            texts.known.add(self._encoder.decode_data(tokens))


class _TenantTexts:
    """Remembers one tenant's texts; callers hold ``lock``."""

    def __init__(self, windows: WindowHash) -> None:
        self.lock = threading.Lock()
        self.known = KnownTexts(windows)
        self.seen_lines = SeenLines()
        self.beginnings = RecentDigests(MOST_BEGINNINGS)
        """The SHA-256 of prompts up to the ends of lines."""

        self.loaded = 0
        """The number of the last context cache whose text is known."""

        self.answers = KnownTexts(windows)
        """The texts of kept answers alone."""

        self.answers_loaded = 0

        self.pieces = RecentDigests(MOST_SIGHTS)
        """The SHA-256 of the token ids of pieces."""

    def remember(self, reading: _Reading) -> None:
        """Remember the texts of a prompt, once it is read: it does not come again within itself."""
        for units in reading.fresh:
            self.seen_lines.note(units)
        if reading.beginnings:
            self.beginnings.add(reading.beginnings)


class _Reading:
    """Reads one prompt, text by text."""

    def __init__(self, texts: _TenantTexts) -> None:
        self.found: list[Passage] = []
        self.fresh: list[list[Line]] = []
        """The units after what began as an earlier prompt did, in rows."""

        self.beginnings: list[bytes] = []
        """The SHA-256 of all that was read up to the end of each unit."""

        self.paragraphs: list[Passage] = []
        """Texts between empty lines that are new, and long enough for chunks."""

        self._texts = texts
        self._digest = hashlib.sha256()

    def read(self, texts: Sequence[PromptText]) -> None:
        """Read the texts of the prompt, and the chunks that stand before each of them."""
        digest = self._digest
        for source in texts:
            digest.update(f"{source.before}{PART_END}".encode(errors="surrogatepass"))
            for first, last in source.sections:
                if last - first < WINDOW:  # no text of a chunk is as short
                    text = source.text[first:last]
                    digest.update(text.encode(errors="surrogatepass"))
                else:
                    self._read_section(source, first, last)
                digest.update(PART_END.encode())

    def _read_section(self, source: PromptText, first: int, last: int) -> None:
        text = source.text[first:last]
        spans = self._texts.known.find(text)
        passages: list[Span] = []
        if len(text) < LEAST_CHARACTERS:
            self._add(text)
        else:
            end = 0
            for (_, before), (begin, behind) in pairwise([(0, 0), *spans, (len(text), len(text))]):
                units = units_of(text, before, begin)
                new = []
                for unit in units:
                    self._add(text[end : unit.end])
                    end = unit.end
                    beginning = self._digest.digest()
                    self.beginnings.append(beginning)
                    if beginning not in self._texts.beginnings:
                        new.append(unit)
                again = self._texts.seen_lines.seen(new)
                passages += again
                self.fresh.append(new)
                unknown = [unit for unit in new if not _within(unit, again)]
                for start, stop in paragraphs(text, unknown):
                    self.paragraphs.append(Passage(source, first + start, first + stop))
                self._add(text[end:behind])
                end = behind
        for start, stop in sorted([*spans, *passages]):
            self.found.append(Passage(source, first + start, first + stop))

    def _add(self, text: str) -> None:
        """Add a text to the digest of all that was read."""
        self._digest.update(text.encode(errors="surrogatepass"))


def _within(unit: Line, spans: Sequence[Span]) -> bool:
    return any(begin <= unit.begin and unit.end <= end for begin, end in spans)
