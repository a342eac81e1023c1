"""Finds prompts that begin as earlier ones did: a tree of what requests computed, whose KV stays in the pool."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import count as counting
from typing import NamedTuple

import numpy as np

from kvlinker.embedded.kv_cache.paths import Items, LinkedChunk, LinkedPath, Positions, linked_choices
from kvlinker.embedded.kv_cache.pool import SlotAllocator, SlotSpan
from kvlinker.linking.policy import Policy
from kvlinker.prompt.segments import Prompt, ReusedPrefix

MOST_LENGTHS = 1024
"""The number of prompt lengths that are remembered, at which policies looked at the question."""

LEAST_TOKENS = 16
"""The fewest tokens that are worth reusing; every span of slots that a sequence sees costs a little in every step."""


class _Node:
    """A part of a path: tokens, and names of chunks as negative numbers, behind those of its parent."""

    def __init__(
        self, parent: _Node | None, items: Positions, starts: Positions, own: Positions, spans: tuple[SlotSpan, ...]
    ) -> None:
        """``items`` [count] begin at the positions ``starts`` [count]. The KV of the positions ``own`` was computed,
        and lies in ``spans``."""
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.items = items
        self.starts = starts
        self.own = own
        self.spans = spans


Part = tuple[_Node, int]
"""A node, and how many of its items are meant."""


class Match(NamedTuple):
    """The longest beginning of a prompt that is in the tree: ``length`` tokens of it."""

    length: int
    parts: list[Part]
    """The nodes from the root on."""


class PrefixTree:
    """Keeps the KV of tokens that requests computed, each tenant's apart, until the slots are needed. Not thread safe.

    A path ends in the middle of a node if two prompts differ there; then the node is divided.
    """

    def __init__(self, allocator: SlotAllocator) -> None:
        self._allocator = allocator
        self._roots: dict[str, _Node] = {}
        self._names: dict[LinkedChunk, int] = {}
        self._chunks: dict[int, LinkedChunk] = {}  # by name
        self._name_uses: Counter[int] = Counter()
        self._new_names = counting(-1, -1)
        self._lengths: OrderedDict[int, None] = OrderedDict()  # of prompts that chunks were linked for
        self._used: OrderedDict[_Node, None] = OrderedDict()  # the last used one last, and parents behind children

    def __len__(self) -> int:
        return len(self._used)

    @property
    def spans(self) -> list[SlotSpan]:
        """All slots that the tree keeps."""
        return [span for node in self._used for span in node.spans]

    def find(self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy) -> ReusedPrefix | None:
        """Return what a prompt, linked under ``policy``, can reuse; None where that is too little.

        ``keys`` are those of the prompt's chunks. Its last token is never reused, since its logits are needed.
        """
        root = self._roots.get(tenant)
        if root is None:
            return None
        match = self._walk(root, prompt.tokens[:-1], linked_choices(prompt, keys, policy, self._lengths), 0)
        if match.length < LEAST_TOKENS:
            return None
        self._touch(match.parts)
        own = np.concatenate([own for own, _ in self._computed(match.parts)])
        linked = {
            int(node.starts[index]): self._chunks[int(node.items[index])].linked
            for node, items in match.parts
            for index in np.flatnonzero(node.items[:items] < 0)
        }
        return ReusedPrefix(match.length, own, linked)

    def acquire(self, path: LinkedPath, reused: ReusedPrefix) -> tuple[SlotSpan, ...]:
        """Return the slots of what was ``reused``, or of as much of its beginning as is still there, with one user
        more. ``path`` is the sequence's."""
        items, starts = self._items(path)
        parts = self._follow(path.tenant, items[starts < reused.length])
        self._touch(parts)
        found: list[SlotSpan] = []
        count = 0
        for own, spans in self._computed(parts):
            if not np.array_equal(own, reused.own[count : count + len(own)]):
                break  # the same beginning was linked anew, by other tokens
            count += len(own)
            found += spans
        self._allocator.share(found)
        return tuple(found)

    def insert(self, path: LinkedPath, own: Positions, spans: Sequence[SlotSpan]) -> None:
        """Keep what a sequence computed: the KV of the positions ``own``, in ``spans`` in that order."""
        if path.asked is not None:
            self._lengths[path.asked] = None
            self._lengths.move_to_end(path.asked)
            if len(self._lengths) > MOST_LENGTHS:
                self._lengths.popitem(last=False)
        items, starts = self._items(path)
        node = self._roots.setdefault(path.tenant, _Node(None, items[:0], starts[:0], own[:0], ()))
        parts = self._follow(path.tenant, items)
        done = 0
        for node, count in parts:
            done += count
            if count < len(node.items):
                self._divide(node, count)
        if done < len(items):
            begin = int(np.searchsorted(own, starts[done]))
            kept = tuple(_cut(spans, begin, len(own)))
            self._allocator.share(kept)
            added = _Node(node, items[done:], starts[done:], own[begin:], kept)
            node.children[int(items[done])] = added
            self._used[added] = None
            self._name_uses.update(_names(added))
        self._touch(parts)

    def evict(self, slots: int) -> None:
        """Give up what was used longest ago, until so many slots are free, or nothing is left that would free any."""
        for node in list(self._used):
            if self._allocator.free >= slots:
                return
            frees = not node.spans or bool((self._allocator.users(node.spans) == 1).any())
            if frees and not node.children:
                self._remove(node)

    def clear(self) -> None:
        """Give up everything."""
        for node in self._used:
            self._allocator.release(node.spans)
        for container in (self._used, self._roots, self._names, self._chunks, self._name_uses):
            container.clear()

    def _follow(self, tenant: str, items: Positions) -> list[Part]:
        """Return the nodes of a path's beginning, and how many items of each."""
        parts: list[Part] = []
        node = self._roots.get(tenant)
        while node is not None:
            alike = min(len(node.items), len(items))
            differ = np.flatnonzero(node.items[:alike] != items[:alike])
            count = int(differ[0]) if differ.size else alike
            parts.append((node, count))
            items = items[count:]
            node = node.children.get(int(items[0])) if count == len(node.items) and len(items) else None
        return parts

    def _walk(self, node: _Node, tokens: Positions, chunks: Items, position: int) -> Match:
        """Return the longest match from a node's first item on, which is to stand at ``position``."""
        count = 0
        while count < len(node.items):
            behind = np.flatnonzero(node.items[count:] < 0)
            plain = int(behind[0]) if behind.size else len(node.items) - count
            plain = min(plain, len(tokens) - position)
            differ = np.flatnonzero(node.items[count : count + plain] != tokens[position : position + plain])
            alike = int(differ[0]) if differ.size else plain
            count, position = count + alike, position + alike
            length = 0
            if alike == plain and count < len(node.items):
                length = self._known(chunks, position).get(int(node.items[count]), 0)
            if not length or position + length > len(tokens):
                break
            count, position = count + 1, position + length
        here = Match(position, [(node, count)])
        if count < len(node.items) or position >= len(tokens):
            return here
        following = [int(tokens[position]), *self._known(chunks, position)]
        matches = [
            self._walk(node.children[item], tokens, chunks, position) for item in following if item in node.children
        ]
        if not matches:
            return here
        longest = max(matches, key=lambda match: match.length)
        return Match(longest.length, [*here.parts, *longest.parts])

    def _known(self, chunks: Items, position: int) -> dict[int, int]:
        """Return the lengths of the chunks that may begin at the position and are in the tree, by their names."""
        return {self._names[chunk]: length for chunk, length in chunks.get(position, ()) if chunk in self._names}

    def _items(self, path: LinkedPath) -> tuple[Positions, Positions]:
        """Return the path's items and the positions where they begin."""
        items, starts, position = [], [], 0
        for start in sorted(path.chunks):
            ((chunk, length),) = path.chunks[start]
            items += [path.tokens[position:start], np.array([self._name(chunk)])]
            starts += [np.arange(position, start + 1)]
            position = start + length
        items.append(path.tokens[position:])
        starts.append(np.arange(position, len(path.tokens)))
        return np.concatenate(items), np.concatenate(starts)

    def _name(self, chunk: LinkedChunk) -> int:
        """Return the chunk's name; one without a node is forgotten with the next that is removed."""
        if chunk not in self._names:
            name = next(self._new_names)
            self._names[chunk], self._chunks[name] = name, chunk
        return self._names[chunk]

    def _computed(self, parts: Sequence[Part]) -> list[tuple[Positions, list[SlotSpan]]]:
        """Return the computed positions in each of the nodes, and their slots."""
        found = []
        for node, count in parts:
            end = len(node.own) if count == len(node.items) else int(np.searchsorted(node.own, node.starts[count]))
            found.append((node.own[:end], _cut(node.spans, 0, end)))
        return found

    def _divide(self, node: _Node, count: int) -> None:
        """Divide the node behind its first ``count`` items: it keeps these, and a child gets the others."""
        size = int(np.searchsorted(node.own, node.starts[count]))
        spans = tuple(_cut(node.spans, size, len(node.own)))
        rest = _Node(node, node.items[count:], node.starts[count:], node.own[size:], spans)
        rest.children, node.children = node.children, {int(node.items[count]): rest}
        for child in rest.children.values():
            child.parent = rest
        node.spans = tuple(_cut(node.spans, 0, size))
        node.items, node.starts, node.own = node.items[:count], node.starts[:count], node.own[:size]
        self._used[rest] = None

    def _remove(self, node: _Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.items[0])]
        del self._used[node]
        self._allocator.release(node.spans)
        self._name_uses.subtract(_names(node))
        for name in {name for name in _names(node) if self._name_uses[name] <= 0}:
            del self._name_uses[name]
            self._names.pop(self._chunks.pop(name), None)

    def _touch(self, parts: Sequence[Part]) -> None:
        """Note a use of these nodes."""
        for node, _ in reversed(parts):
            if node.parent is not None:
                self._used.move_to_end(node)


def _names(node: _Node) -> list[int]:
    names: list[int] = node.items[node.items < 0].tolist()
    return names


def _cut(spans: Sequence[SlotSpan], begin: int, end: int) -> list[SlotSpan]:
    """Return the slots from number ``begin`` to ``end``, counted over all spans."""
    found, position = [], 0
    for span in spans:
        first, last = max(begin - position, 0), min(end - position, span.size)
        if first < last:
            found.append(SlotSpan(span.slot + first, last - first))
        position += span.size
    return found
