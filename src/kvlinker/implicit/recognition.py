"""Finds in unmarked text what is worth a chunk: texts of known chunks, and passages that come again.

Where a text is cut depends on what is cut out, not on what stands before it, so frameworks may join retrieved texts as
they like. Nothing is taken on a hash's word: what becomes a chunk is the text itself.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from kvlinker.implicit.known import KnownTexts, Span
from kvlinker.implicit.sights import LEAST_CHARACTERS, Sights, Unit, units_of
from kvlinker.implicit.windows import WINDOW, WindowHash
from kvlinker.prompt.encoding import TextEncoder
from kvlinker.store import Catalog
from kvlinker.types.messages import CachedPart, ChatMessage, Content, MarkedText

MOST_TENANTS = 64
"""The most tenants whose texts are remembered; of the others, those that asked longest ago are forgotten."""

MOST_CONVERSATIONS = 1024
"""The most conversations of one tenant that are known when they go on."""

MOST_LOADED = 2048
"""The most chunks that are read from the catalog at once; of more, the newest."""


class Recognizer:
    """Marks texts in prompts that are to be chunks. Methods may be called from any thread."""

    def __init__(self, catalog: Catalog, encoder: TextEncoder, *, fingerprint: str) -> None:
        self._catalog = catalog
        self._encoder = encoder
        self._fingerprint = fingerprint
        self._lock = threading.Lock()  # guards the tenants, not what each of them has
        self._tenants: OrderedDict[str, _TenantTexts] = OrderedDict()

    def mark(
        self, messages: Sequence[ChatMessage[CachedPart]], *, tenant: str, notes: bool = True
    ) -> list[ChatMessage[CachedPart]]:
        """Return the messages with known texts and passages that come again marked, and remember all others.

        Messages with which an earlier conversation ended, so that this one goes on, are not seen again by that. Without
        ``notes``, nothing is remembered.
        """
        states = _states(messages)
        texts = self._texts_of(tenant)
        with texts.lock:
            self._load(texts, tenant)
            old = next(
                (count for count in range(len(states) - 1, 0, -1) if states[count - 1] in texts.conversations), 0
            )
            marked: list[ChatMessage[CachedPart]] = []
            for index, message in enumerate(messages):
                content = texts.mark(message.content, again=index >= old, notes=notes)
                marked.append(ChatMessage(message.role, content, message.name))
            if notes:
                texts.finish(states[-1] if states else b"")
            return marked

    def _texts_of(self, tenant: str) -> _TenantTexts:
        with self._lock:
            texts = self._tenants.setdefault(tenant, _TenantTexts())
            self._tenants.move_to_end(tenant)
            if len(self._tenants) > MOST_TENANTS:
                self._tenants.popitem(last=False)
            return texts

    def _load(self, texts: _TenantTexts, tenant: str) -> None:
        """Have the tenant's texts know all chunks that the catalog has of it by now."""
        texts.loaded, chunks = self._catalog.implicit.chunks_since(
            texts.loaded, tenant, self._fingerprint, limit=MOST_LOADED
        )
        for chunk in chunks:
            texts.known.add(self._encoder.decode_data(chunk.tokens))


class _TenantTexts:
    """What is remembered of one tenant's texts; whoever uses it holds ``lock``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.known = KnownTexts(WindowHash())
        self.conversations: OrderedDict[bytes, None] = OrderedDict()
        self.loaded = 0
        """The number of the last context cache whose text is known."""
        self._sights = Sights()
        self._fresh: list[list[Unit]] = []  # of the prompt that is being read

    def mark(self, content: Content[CachedPart], *, again: bool, notes: bool) -> Content[CachedPart]:
        """Return a message's content with texts marked; passages that come ``again``, too."""
        parts: list[str | CachedPart] = []
        for part in content:
            parts += self._cut(part, again=again, notes=notes) if isinstance(part, str) else [part]
        return tuple(parts)

    def finish(self, state: bytes) -> None:
        """Remember what the prompt that was read brought: only now, so that it does not come again within itself."""
        for units in self._fresh:
            self._sights.note(units)
        self._fresh.clear()
        self.conversations[state] = None
        self.conversations.move_to_end(state)
        if len(self.conversations) > MOST_CONVERSATIONS:
            self.conversations.popitem(last=False)

    def _cut(self, text: str, *, again: bool, notes: bool) -> list[str | CachedPart]:
        if len(text) < WINDOW:
            return [text]
        spans = self.known.find(text)
        if again and len(text) >= LEAST_CHARACTERS:
            spans = sorted([*spans, *self._passages(text, spans, notes=notes)])
        return _marked(text, spans)

    def _passages(self, text: str, known: Sequence[Span], *, notes: bool) -> list[Span]:
        """Return the passages outside known texts that were seen before."""
        passages: list[Span] = []
        for (_, begin), (end, _) in pairwise([(0, 0), *known, (len(text), len(text))]):
            units = units_of(text, begin, end)
            passages += self._sights.seen(units)
            if notes:
                self._fresh.append(units)
        return passages


def _marked(text: str, spans: Iterable[Span]) -> list[str | CachedPart]:
    parts: list[str | CachedPart] = []
    done = 0
    for begin, end in spans:
        parts += [text[done:begin], MarkedText(text[begin:end])]
        done = end
    return [part for part in [*parts, text[done:]] if part != ""]


def _states(messages: Sequence[ChatMessage[CachedPart]]) -> list[bytes]:
    """Return the SHA-256 of the conversation up to each message."""
    digest, states = hashlib.sha256(), []
    for message in messages:
        told = repr((message.role, message.name, message.content)).encode(errors="surrogatepass")
        digest.update(len(told).to_bytes(8, "little") + told)
        states.append(digest.digest())
    return states
