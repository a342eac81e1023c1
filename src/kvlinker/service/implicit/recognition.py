"""Finds parts of unmarked text that are worth a chunk: texts of known chunks, and repeated
passages.

The cuts in a text depend on the passages themselves, not on the text before them, so frameworks may
join retrieved texts as they like. Nothing is taken on a hash's word: what becomes a chunk is the
text itself.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

from kvlinker.base.errors import CatalogUnavailableError, InvalidRequestError
from kvlinker.base.events import AnswerKept, Event, Events
from kvlinker.base.types.chunks import salted
from kvlinker.base.types.messages import CachedPart, ChatMessage, MarkedText, TextSource
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.service.implicit.known import WINDOW, KnownTexts, Span, WindowHash
from kvlinker.service.implicit.seen_lines import (
    LEAST_CHARACTERS,
    Line,
    RecentDigests,
    SeenLines,
    paragraphs,
    units_of,
)
from kvlinker.store import Catalog

MOST_TENANTS = 64
"""The most tenants, each salt of theirs apart, whose texts are remembered; of the others, those
that asked longest ago are forgotten."""

LOOK_SECONDS = 60.0
"""After so many seconds, the catalog is asked again which tenants have kept answers."""

MOST_BEGINNINGS = 16_384
"""The most beginnings of prompts, each up to the end of a line, that are remembered of one
tenant."""

MOST_LOADED = 2048
"""The most chunks that are read from the catalog at once; of more, the newest."""

PART_END = "\0"
"""Stands after each part of a prompt in what is hashed of it."""


class Recognizer:
    """Marks texts in prompts that are to be chunks. Methods may be called from any thread."""

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
        events.subscribe(self._listen)

    def mark(
        self,
        messages: Sequence[ChatMessage[CachedPart]],
        *,
        tenant: str,
        salt: str = "",
        notes: bool = True,
    ) -> tuple[list[ChatMessage[CachedPart]], list[str]]:
        """Return the messages with known texts and passages that come again in requests with this
        salt marked, and the paragraphs that are seen for the first time; remember all others.

        The common beginning of a prompt and an earlier one does not count as repeated: it is reused
        as it was computed. Without ``notes``, nothing is remembered.
        """
        texts = self._texts_of(tenant, salt)
        with texts.lock:
            with suppress(CatalogUnavailableError):  # what is known already is recognised
                self._load(texts, tenant, salt)
            reading = _Reading(texts)
            marked = [reading.mark(message) for message in messages]
            if notes:
                texts.remember(reading)
            return marked, reading.paragraphs if notes else []

    def mark_answers(
        self, messages: Sequence[ChatMessage[CachedPart]], *, tenant: str, salt: str = ""
    ) -> Sequence[ChatMessage[CachedPart]]:
        """Return the messages with the texts of kept answers marked, and no others. Those that
        another server kept may be missed for a minute."""
        if time.monotonic() - self._looked_at > LOOK_SECONDS:
            self._look()
        if tenant not in self._keeping:
            return messages
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
            if not len(texts.answers):
                return messages
            return [_with_known(message, texts.answers) for message in messages]

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
        """Have the tenant's texts know all chunks that the catalog has of it by now."""
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

    def remember(self, reading: _Reading) -> None:
        """Remember the texts of a prompt, once it is read: it does not come again within itself."""
        for units in reading.fresh:
            self.seen_lines.note(units)
        self.beginnings.add(reading.beginnings)


class _Reading:
    """Reads one prompt, message by message."""

    def __init__(self, texts: _TenantTexts) -> None:
        self.fresh: list[list[Line]] = []
        """The units after what began as an earlier prompt did, in rows."""

        self.beginnings: list[bytes] = []
        """The SHA-256 of all that was read up to the end of each unit."""

        self.paragraphs: list[str] = []
        """Texts between empty lines that are new, and long enough for chunks."""

        self._texts = texts
        self._digest = hashlib.sha256()

    def mark(self, message: ChatMessage[CachedPart]) -> ChatMessage[CachedPart]:
        """Return a message with texts marked."""
        self._read(repr((message.role, message.name, message.fields)) + PART_END)
        parts: list[str | CachedPart] = []
        for part in message.content:
            if isinstance(part, str):
                parts += self._cut(part)
            else:
                self._read(repr(part))
                parts.append(part)
            self._read(PART_END)
        return replace(message, content=tuple(parts))

    def _cut(self, text: str) -> list[str | CachedPart]:
        """Return the text with known texts in it marked, and passages that come again."""
        spans = self._texts.known.find(text) if len(text) >= WINDOW else []
        if len(text) < LEAST_CHARACTERS:
            self._read(text)
            return _marked(text, spans)
        passages: list[Span] = []
        end = 0
        for (_, before), (begin, behind) in pairwise([(0, 0), *spans, (len(text), len(text))]):
            units = units_of(text, before, begin)
            new = []
            for unit in units:
                self._read(text[end : unit.end])
                end = unit.end
                beginning = self._digest.digest()
                self.beginnings.append(beginning)
                if beginning not in self._texts.beginnings:
                    new.append(unit)
            again = self._texts.seen_lines.seen(new)
            passages += again
            self.fresh.append(new)
            self.paragraphs += paragraphs(text, [unit for unit in new if not _within(unit, again)])
            self._read(text[end:behind])
            end = behind
        return _marked(text, sorted([*spans, *passages]))

    def _read(self, text: str) -> None:
        self._digest.update(text.encode(errors="surrogatepass"))


def _with_known(message: ChatMessage[CachedPart], known: KnownTexts) -> ChatMessage[CachedPart]:
    """Return a message with the known texts in its unmarked ones marked."""
    content: list[str | CachedPart] = []
    for part in message.content:
        content += _marked(part, known.find(part)) if isinstance(part, str) else [part]
    return replace(message, content=tuple(content))


def _within(unit: Line, spans: Sequence[Span]) -> bool:
    return any(begin <= unit.begin and unit.end <= end for begin, end in spans)


def _marked(text: str, spans: Iterable[Span]) -> list[str | CachedPart]:
    parts: list[str | CachedPart] = []
    done = 0
    for begin, end in spans:
        parts += [text[done:begin], MarkedText(text[begin:end], source=TextSource.RECOGNITION)]
        done = end
    return [part for part in [*parts, text[done:]] if part != ""]
