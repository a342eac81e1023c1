"""A node of the tree of prefixes: a part of a path, and the place of its KV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import sha256
from typing import NamedTuple

import numpy as np

from kvlinker.engines.embedded.kv_cache.paths import PathChunk, Positions
from kvlinker.engines.embedded.kv_cache.pool import SlotSpan, cut
from kvlinker.prompting.segments import StoredKV


class PrefixNode:
    """A part of a path: tokens, and names of chunks as negative numbers, after those of its
    parent."""

    def __init__(
        self,
        parent: PrefixNode | None,
        items: Positions,
        starts: Positions,
        own: Positions,
        spans: tuple[SlotSpan, ...] | None,
        *,
        stored: StoredKV | None = None,
        tenant: str = "",
    ) -> None:
        """``items`` [count] begin at the positions ``starts`` [count]. The KV of the positions
        ``own`` was computed, and lies in ``spans``, or, where they are None, on disk (``stored``);
        it may lie in both."""
        self.parent = parent
        self.children: dict[int, PrefixNode] = {}
        self.items = items
        self.starts = starts
        self.own = own
        self.spans = spans
        self.stored = stored
        self.expected_until = math.inf
        """The time, by the tree's clock, until which it is expected to be used again, which may be
        over; infinity if it is not expected."""

        self.tenant: str = tenant if parent is None else parent.tenant

    @property
    def has_children_in_pool(self) -> bool:
        """True if the KV of any child is in the pool."""
        return any(child.spans is not None for child in self.children.values())

    @property
    def slots(self) -> tuple[SlotSpan, ...]:
        """Its slots; none for a node that is on disk."""
        return self.spans or ()

    @property
    def chunk_names(self) -> list[int]:
        """The names of the chunks among its items, in order."""
        names: list[int] = self.items[self.items < 0].tolist()
        return names

    def own_count(self, count: int) -> int:
        """Return how many positions were computed in its first ``count`` items."""
        return (
            len(self.own)
            if count == len(self.items)
            else int(np.searchsorted(self.own, self.starts[count]))
        )

    def divide(self, count: int) -> PrefixNode:
        """Keep the first ``count`` items, and return a new child that gets the others, and all
        children so far."""
        size = self.own_count(count)
        spans = None if self.spans is None else tuple(cut(self.spans, size, len(self.own)))
        rest = PrefixNode(self, self.items[count:], self.starts[count:], self.own[size:], spans)
        if self.stored is not None:
            key, first, last = self.stored.key, self.stored.first, self.stored.last
            self.stored, rest.stored = (
                StoredKV(key, first, first + size),
                StoredKV(key, first + size, last),
            )
        rest.expected_until = self.expected_until
        rest.children, self.children = self.children, {int(self.items[count]): rest}
        for child in rest.children.values():
            child.parent = rest
        self.spans = None if self.spans is None else tuple(cut(self.spans, 0, size))
        self.items, self.starts, self.own = self.items[:count], self.starts[:count], self.own[:size]
        return rest

    def key(self, fingerprint: str, chunks: Mapping[int, PathChunk]) -> str:
        """Return the key of its KV: SHA-256 (hex) over model, tenant, all that the KV depends on,
        and which positions it is of. ``chunks`` are those of the names."""
        line, before = [self], self.parent
        while before is not None:
            line.append(before)
            before = before.parent
        items = np.concatenate([node.items for node in reversed(line)])
        named = [chunks[name] for name in items[items < 0].tolist()]
        digest = sha256(
            json.dumps(["kvlinker prefix", fingerprint, self.tenant, len(items), named]).encode()
        )
        digest.update(np.maximum(items, -1).astype("<i8").tobytes())
        digest.update(self.own.astype("<i8").tobytes())
        return digest.hexdigest()


Part = tuple[PrefixNode, int]
"""A node, and how many of its items are meant."""


class Match(NamedTuple):
    """The longest beginning of a prompt that is in the tree: ``length`` tokens of it."""

    length: int
    parts: list[Part]
    """The nodes from the root on."""
