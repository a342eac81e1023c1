"""Remembers the order in which prompts had the same chunks before, since the linked KV of that
beginning can be reused."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from typing import TypeVar

from kvlinker.base.types.messages import CachedPart, ChatMessage, Document, MarkedText

MOST_ORDERS = 8192
"""The most sets of chunks whose orders are remembered; those that were asked for last stay."""

P = TypeVar("P", bound=str | CachedPart | Document[CachedPart])


class DocumentOrders:
    """Knows orders by hashes; it keeps no text. Methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # of names, by the set

    def arranged(
        self,
        owner: str,
        documents: Sequence[Document[CachedPart]],
        messages: Sequence[ChatMessage[CachedPart]],
    ) -> tuple[Sequence[Document[CachedPart]], Sequence[ChatMessage[CachedPart]]]:
        """Return documents, and the runs of chunks in each message, in the order in which a prompt
        of the owner had the same ones before."""
        arranged = partial(self.arranged_runs, owner)
        return arranged(documents), [
            replace(message, content=tuple(arranged(message.content))) for message in messages
        ]

    def arranged_runs(self, owner: str, parts: Sequence[P]) -> Sequence[P]:
        """Return the parts of a content, or documents, where each run of neighbouring chunks is in
        the order in which the owner's prompts had the same ones before."""
        arranged: list[P] = []
        for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
            run = list(group)
            arranged += run if is_text else self._arranged(owner, run)
        return arranged

    def _arranged(self, owner: str, chunks: Sequence[P]) -> Sequence[P]:
        named = {_name(chunk): chunk for chunk in chunks}
        if len(named) < len(chunks) or len(chunks) < 2:
            return chunks
        key = sha256(b"".join([owner.encode(), *sorted(named)])).digest()
        with self._lock:
            order = self._orders.setdefault(key, tuple(named))
            self._orders.move_to_end(key)
            if len(self._orders) > MOST_ORDERS:
                self._orders.popitem(last=False)
        return [named[name] for name in order]


def _name(part: str | CachedPart | Document[CachedPart]) -> bytes:
    """Return a hash of a chunk's text, or of its id."""
    if isinstance(part, Document):
        return sha256(repr(part.fields).encode(errors="surrogatepass") + _name(part.text)).digest()
    says = part if isinstance(part, str) else repr(part)
    if isinstance(part, MarkedText):
        says = part.text
    return sha256(says.encode(errors="surrogatepass")).digest()
