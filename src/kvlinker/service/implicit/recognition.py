"""Finds parts of a prompt's texts that are worth a chunk: texts of known chunks, and repeated
passages.

The cuts in a text depend on the passages themselves, not on the text before them, so frameworks may
join retrieved texts as they like. Nothing is taken on a hash's word: what becomes a chunk is the
text itself, with the token ids that it has in the prompt.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

from kvlinker.base.errors import CatalogUnavailableError, InvalidRequestError
from kvlinker.base.events import AnswerKept, Event, Events
from kvlinker.base.types.chunks import salted
from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.segments import Passage, PromptText, Span
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
from kvlinker.store import Catalog

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
