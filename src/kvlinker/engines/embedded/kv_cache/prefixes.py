"""Finds prompts that begin as earlier ones did: a tree of the paths of requests, with KV in the
pool or on disk."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count as counting
from typing import Any

import numpy as np

from kvlinker.engines.embedded.kv_cache.paths import PathChoices, PathChunk, Positions, SequencePath
from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator, SlotSpan, cut, joined
from kvlinker.engines.embedded.kv_cache.prefix_node import Match, Part, PrefixNode
from kvlinker.engines.embedded.kv_cache.spilling import PoolSpill
from kvlinker.engines.embedded.kv_cache.states import PrefixStates, SequenceState
from kvlinker.linking.policy import Policy
from kvlinker.prompting.segments import Prompt, ReusedPrefix, StoredKV

EXPECTED_SHARE = 0.5
"""The largest share of the pool's slots that expected prefixes may keep from other prefixes of
their tenant."""

LENGTH_LIMIT = 1024
"""The number of prompt lengths that are remembered, at which policies looked at the question."""

LEAST_TOKENS = 16
"""The fewest tokens that are worth reusing; every span of slots that a sequence sees costs a little
in every step."""

SWEEP_MINIMUM = 256
"""The fewest nodes on disk among which those are looked for whose files are gone."""

UNNAMED = -1
"""The item of a chunk that no node has. Names of chunks are smaller."""


class PrefixTree:
    """Keeps the KV of tokens that requests computed, each tenant's apart, until the slots are
    needed. Not thread safe.

    A path ends in the middle of a node if two prompts differ there; then the node is divided. With
    a spill, nodes whose slots are needed stay in the tree while their KV is on disk. The KV
    before a node that is in the pool is there, too.
    """

    def __init__(
        self,
        allocator: SlotAllocator,
        spill: PoolSpill | None = None,
        states: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``states`` is the number of states to keep for a model whose layers keep one: a prompt
        goes on only from where one was kept."""
        self._states = None if states is None else PrefixStates(states)
        self._allocator = allocator
        self._clock = clock
        self._spill = spill
        self._roots: dict[str, PrefixNode] = {}
        self._names: dict[PathChunk, int] = {}
        self._chunks: dict[int, PathChunk] = {}  # by name
        self._name_uses: Counter[int] = Counter()
        self._new_names = counting(UNNAMED - 1, -1)
        # Of prompts that chunks were linked for.
        self._lengths: OrderedDict[int, None] = OrderedDict()
        # The last used one last, and parents after children.
        self._used: OrderedDict[PrefixNode, None] = OrderedDict()
        # All others, parents after children: their KV is on disk, or was.
        self._spilled: dict[PrefixNode, None] = {}
        self._sweep_at = SWEEP_MINIMUM
        if spill is not None and spill.note is not None:
            self._recall(spill.note)

    def __len__(self) -> int:
        return len(self._used) + len(self._spilled)

    @property
    def spans(self) -> list[SlotSpan]:
        """All slots that the tree keeps."""
        return [span for node in self._used for span in node.slots]

    def find(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy
    ) -> ReusedPrefix | None:
        """Return the beginning that a prompt, linked under ``policy``, can reuse; None if that is
        too little.

        ``keys`` are those of the prompt's chunks. Its last token is never reused, since its logits
        are needed.
        """
        root = self._roots.get(tenant)
        if root is None:
            return None
        choices = PathChoices(prompt, keys, policy, self._lengths)
        match = self._longest(root, prompt.tokens[:-1], choices)
        if self._states is not None:
            match = Match(*self._states.furthest(match.parts))
        match, stored = self._choose_stored(match)
        if match.length < LEAST_TOKENS:
            return None
        self._touch(match.parts)
        own = np.concatenate([node.own[: node.own_count(count)] for node, count in match.parts])
        linked = {
            int(node.starts[index]): self._chunks[int(node.items[index])].linked
            for node, items in match.parts
            for index in np.flatnonzero(node.items[:items] < 0)
        }
        return ReusedPrefix(match.length, own, linked, stored)

    def acquire(
        self, path: SequencePath, own: Positions
    ) -> tuple[tuple[SlotSpan, ...], SequenceState | None]:
        """Return the slots of as much of the beginning of ``path`` as is there, with one user more.
        ``own`` are the positions of the sequence that computes the path: those of slots must be
        the same.

        Where layers keep a state, the beginning ends where one was kept, which is returned, too.
        """
        parts = self._follow(path.tenant, self._items(path)[0])
        if self._states is not None:
            parts = self._states.furthest(parts)[1] if parts else []
        self._touch(parts)
        found: list[SlotSpan] = []
        count = 0
        for node, items_count in parts:
            size = node.own_count(items_count)
            if node.spans is None or not np.array_equal(node.own[:size], own[count : count + size]):
                if self._states is not None:
                    return (), None
                break  # it is on disk, or the same beginning was linked anew, by other tokens
            count += size
            found += cut(node.spans, 0, size)
        found = joined(found)
        self._allocator.share(found)
        state = None if self._states is None or not parts else self._states.at(parts[-1][0])
        return tuple(found), state

    def expect(
        self, tenant: str, prompt: Prompt, keys: Sequence[str], policy: Policy, seconds: float
    ) -> None:
        """Expect a prompt that begins as this one within ``seconds``. Until then, it is evicted
        last of its tenant's prefixes, and afterwards first."""
        root = self._roots.get(tenant)
        if root is not None:
            until = self._clock() + seconds
            choices = PathChoices(prompt, keys, policy, self._lengths)
            for node, _ in self._longest(root, prompt.tokens, choices).parts:
                node.expected_until = until

    def insert(
        self,
        path: SequencePath,
        own: Positions,
        spans: Sequence[SlotSpan],
        states: Sequence[SequenceState] = (),
    ) -> None:
        """Keep the KV of a sequence: the KV of the positions ``own``, in ``spans`` in that order,
        and its ``states`` at some positions."""
        if path.asked is not None:
            self._lengths[path.asked] = None
            self._lengths.move_to_end(path.asked)
            if len(self._lengths) > LENGTH_LIMIT:
                self._lengths.popitem(last=False)
        for chunk, _ in path.chunks.values():
            if chunk not in self._names:  # its name goes with the last node that has it
                name = next(self._new_names)
                self._names[chunk], self._chunks[name] = name, chunk
        items, starts = self._items(path)
        root = PrefixNode(None, items[:0], starts[:0], own[:0], (), tenant=path.tenant)
        node = self._roots.setdefault(path.tenant, root)
        parts = self._follow(path.tenant, items)
        done = 0
        for node, count in parts:
            if count < len(node.items):
                self._divide(node, count)
            if node.spans is None:
                end = starts[done + count] if done + count < len(items) else len(path.tokens)
                first, last = np.searchsorted(own, [starts[done], end]).tolist()
                self._return(node, own[first:last], tuple(cut(spans, first, last)))
            done += count
        if done < len(items):
            begin = int(np.searchsorted(own, starts[done]))
            kept = tuple(cut(spans, begin, len(own)))
            self._allocator.share(kept)
            added = PrefixNode(node, items[done:], starts[done:], own[begin:], kept)
            node.children[int(items[done])] = added
            self._used[added] = None
            self._name_uses.update(added.chunk_names)
        for state in states:
            self._keep_state(path, state)
        self._touch(self._follow(path.tenant, items))  # behind what was divided off

    def evict(self, slots: int) -> None:
        """Evict prefixes until ``slots`` slots are free. Stop early if no other prefix would free
        any."""
        for node in eviction_order(self._used, self._allocator, self._clock()):
            if self._allocator.free >= slots:
                break
            self._evict_node(node)
        self._sweep()

    def leave(self, seconds: float) -> None:
        """Leave to the next process that computes alike the KV that is on disk, or is written there
        within ``seconds``, the last used first. The tree must not be used any more. Raises
        OSError."""
        spill, deadline, tokens = self._spill, time.monotonic() + seconds, 0
        if spill is None:
            return
        for node in reversed(self._used):
            tokens += len(node.own)
            if not spill.fits(tokens) or time.monotonic() > deadline:
                break
            if not self._write(node):
                spill.flush(deadline)  # too much was waiting, maybe
                self._write(node)
        spill.flush(deadline)
        spill.drop_waiting()
        for node in self._used:  # the first used, and what stands last, is to go first there, too
            if node.stored is not None:
                spill.touch(node.stored.key)
        self._spill = None
        spill.leave(json.dumps(self._described(spill)).encode())

    def _described(self, spill: PoolSpill) -> dict[str, Any]:
        """Describe the nodes whose KV, with all before it, is on disk, parents before children."""
        known: list[tuple[PrefixNode, int | None]] = [(root, None) for root in self._roots.values()]
        for number, (node, _) in enumerate(known):  # which grows meanwhile
            known += [
                (child, number)
                for child in node.children.values()
                if not len(child.own) or (child.stored and spill.contains(child.stored.key))
            ]
        used = set[int]()
        for number in reversed(range(len(known))):
            node, parent = known[number]
            if parent is not None and (len(node.own) or number in used):
                used |= {number, parent}
        numbers = {number: place for place, number in enumerate(sorted(used))}
        kept = [known[number] for number in numbers]
        names = {name for node, _ in kept for name in node.chunk_names}
        return {
            "nodes": [
                {
                    "parent": None if parent is None else numbers[parent],
                    "tenant": node.tenant,
                    "stored": node.stored
                    and (node.stored.key, node.stored.first, node.stored.last),
                    "items": node.items.tolist(),
                    "starts": node.starts.tolist(),
                    "own": node.own.tolist(),
                }
                for node, parent in kept
            ],
            "chunks": [(name, self._chunks[name]) for name in names],
            "lengths": list(self._lengths),
        }

    def _recall(self, note: bytes) -> None:
        """Know what an earlier process has left, by its ``note``."""
        said = json.loads(note)
        for name, (key, linked) in said["chunks"]:
            self._chunks[name] = PathChunk(key, linked)
            self._names[self._chunks[name]] = name
        self._new_names = counting(min([*self._chunks, UNNAMED]) - 1, -1)
        self._lengths.update(dict.fromkeys(said["lengths"]))
        nodes: list[PrefixNode] = []
        for each in said["nodes"]:
            parent = None if each["parent"] is None else nodes[each["parent"]]
            items, starts, own = (
                np.array(each[name], np.int64) for name in ("items", "starts", "own")
            )
            node = PrefixNode(
                parent,
                items,
                starts,
                own,
                () if parent is None else None,
                stored=each["stored"] and StoredKV(*each["stored"]),
                tenant=each["tenant"],
            )
            nodes.append(node)
            self._name_uses.update(node.chunk_names)
            if parent is None:
                self._roots[node.tenant] = node
            else:
                parent.children[int(items[0])] = node
        self._spilled.update((node, None) for node in reversed(nodes) if node.parent is not None)

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
            node = (
                node.children.get(int(items[0]))
                if count == len(node.items) and len(items)
                else None
            )
        return parts

    def _longest(self, root: PrefixNode, tokens: Positions, choices: PathChoices) -> Match:
        """Return the longest match from the root on; of equal ones, that whose chunks were computed
        as tokens."""
        length, last = 0, (root, 0)
        ahead = [(root, 0)]  # nodes that may go on with the match, and where they would begin
        while ahead:
            node, begin = ahead.pop()
            if self._lost(node):
                continue
            count, end = self._match(node, tokens, choices, begin)
            if end > length:
                length, last = end, (node, count)
            if node.children and count == len(node.items) and end < len(tokens):
                following = [
                    int(tokens[end]),
                    *(self._names.get(chunk, UNNAMED) for chunk in choices.at(end)),
                ]
                ahead += [
                    (node.children[item], end)
                    for item in reversed(following)
                    if item in node.children
                ]
        parts = [last]
        while (parent := parts[-1][0].parent) is not None:
            parts.append((parent, len(parent.items)))
        return Match(length, parts[::-1])

    def _match(
        self, node: PrefixNode, tokens: Positions, choices: PathChoices, position: int
    ) -> tuple[int, int]:
        """Return how many of the node's items the prompt has from the position on, and where the
        last of them ends."""
        count = 0
        while count < len(node.items):
            behind = np.flatnonzero(node.items[count:] < 0)
            plain = int(behind[0]) if behind.size else len(node.items) - count
            plain = min(plain, len(tokens) - position)
            differ = np.flatnonzero(
                node.items[count : count + plain] != tokens[position : position + plain]
            )
            alike = int(differ[0]) if differ.size else plain
            count, position = count + alike, position + alike
            length = 0
            if alike == plain and count < len(node.items):
                chunk = self._chunks.get(int(node.items[count]))
                length = 0 if chunk is None else choices.length(chunk, position)
            if not length or position + length > len(tokens):
                break
            count, position = count + 1, position + length
        return count, position

    def _items(self, path: SequencePath) -> tuple[Positions, Positions]:
        """Return the path's items and the positions where they begin; chunks that no node has are
        ``UNNAMED``."""
        items, starts, position = [], [], 0
        for start, (chunk, length) in sorted(path.chunks.items()):
            items += [path.tokens[position:start], np.array([self._names.get(chunk, UNNAMED)])]
            starts += [np.arange(position, start + 1)]
            position = start + length
        items.append(path.tokens[position:])
        starts.append(np.arange(position, len(path.tokens)))
        return np.concatenate(items), np.concatenate(starts)

    def _choose_stored(self, match: Match) -> tuple[Match, tuple[StoredKV, ...]]:
        """Return as much of the match as is in the pool, or on disk and quicker to load than to
        compute; and what of it is to be loaded."""
        first = next(
            (index for index, (node, _) in enumerate(match.parts) if node.spans is None), None
        )
        if first is None or self._spill is None:
            return match, ()
        wanted = [(node, node.own_count(count)) for node, count in match.parts[first:]]
        if not self._spill.pays(np.concatenate([node.own[:size] for node, size in wanted])):
            return Match(int(match.parts[first][0].starts[0]), match.parts[:first]), ()
        parts = [(node.stored, size) for node, size in wanted if node.stored is not None and size]
        return match, tuple(
            StoredKV(stored.key, stored.first, stored.first + size) for stored, size in parts
        )

    def _lost(self, node: PrefixNode) -> bool:
        """Return whether a match must not go through the node: its KV is neither in the pool nor on
        disk, or it has none and leads to none."""
        if node.spans is not None:
            return False
        if not len(node.own):
            return not node.children
        return (
            self._spill is None or node.stored is None or not self._spill.contains(node.stored.key)
        )

    def _evict_node(self, node: PrefixNode) -> None:
        """Take a node without children in the pool out of that: its KV goes to disk, or the node
        goes with all that stands after it."""
        if not self._write(node):
            self._remove(node)
            return
        self._allocator.release(node.slots)
        node.spans = None
        del self._used[node]
        self._spilled[node] = None

    def _write(self, node: PrefixNode) -> bool:
        """Write the node's KV to disk, if it is worth that, or something after it is there; return
        whether it is on disk."""
        if self._spill is None or not len(node.own):
            return bool(node.children)
        if node.stored is not None and self._spill.contains(node.stored.key):
            return True
        if not node.children and (len(node.own) < LEAST_TOKENS or not self._spill.pays(node.own)):
            return False
        key = node.key(self._spill.fingerprint, self._chunks)
        if not self._spill.write(key, node.slots):
            return False
        node.stored = StoredKV(key, 0, len(node.own))
        return True

    def _return(self, node: PrefixNode, own: Positions, spans: tuple[SlotSpan, ...]) -> None:
        """Keep in these slots what a node on disk stands for: it was loaded, or computed again,
        maybe at other positions."""
        if not np.array_equal(own, node.own):
            node.own, node.stored = own, None
        self._allocator.share(spans)
        node.spans = spans
        del self._spilled[node]
        self._used[node] = None

    def _sweep(self) -> None:
        """Remove lost nodes, and those after them; now and then, since that looks at all nodes."""
        if len(self._spilled) < self._sweep_at:
            return
        for node in list(self._spilled):
            if node in self._spilled and self._lost(node):
                self._remove(node)
        self._sweep_at = max(SWEEP_MINIMUM, 2 * len(self._spilled))

    def _keep_state(self, path: SequencePath, state: SequenceState) -> None:
        """Keep a state of a path, but within a chunk."""
        assert self._states is not None
        items, starts = self._items(path)
        edges = np.append(starts, len(path.tokens))
        count = int(np.searchsorted(edges, state.position))
        if 0 < count < len(edges) and edges[count] == state.position:
            node, size = self._follow(path.tenant, items[:count])[-1]
            if size < len(node.items):
                self._divide(node, size)
            self._states.put(node, state)

    def _divide(self, node: PrefixNode, count: int) -> None:
        """Divide the node: it keeps its first ``count`` items, and a child gets the others."""
        rest = node.divide(count)
        (self._spilled if rest.spans is None else self._used)[rest] = None
        if self._states is not None:
            self._states.move_to(node, rest)

    def _remove(self, node: PrefixNode) -> None:
        """Take the node out of the tree, with all that stands after it."""
        parent = node.parent
        assert parent is not None
        del parent.children[int(node.items[0])]
        if parent.parent is None and not parent.children:
            self._roots.pop(parent.tenant, None)
        leaving = [node]
        while leaving:
            gone = leaving.pop()
            leaving += gone.children.values()
            self._allocator.release(gone.slots)
            (self._spilled if gone.spans is None else self._used).pop(gone)
            if self._states is not None:
                self._states.drop(gone)
            self._name_uses.subtract(gone.chunk_names)
            for name in {name for name in gone.chunk_names if self._name_uses[name] <= 0}:
                del self._name_uses[name]
                self._names.pop(self._chunks.pop(name), None)

    def _touch(self, parts: Sequence[Part]) -> None:
        """Note a use of these nodes."""
        for node, _ in reversed(parts):
            node.expected_until = math.inf
            if node in self._used:
                self._used.move_to_end(node)


def eviction_order(
    used: Collection[PrefixNode], allocator: SlotAllocator, now: float
) -> Iterator[PrefixNode]:
    """Yield the nodes of ``used`` in the order in which they are evicted. ``used`` has the nodes in
    the pool, the one used last at the end; the caller removes each node from it before the next.

    Prefixes that were expected but not used are evicted first, then those that were used longest
    ago. When an expected prefix is next, the prefix of its tenant that is needed last is evicted in
    its place, as long as expected prefixes keep at most ``EXPECTED_SHARE`` of the pool.
    """

    def is_evictable(node: PrefixNode) -> bool:
        frees = not node.spans or bool((allocator.users(node.spans) == 1).any())
        return frees and not node.has_children_in_pool

    expected = {node for node in used if now <= node.expected_until < math.inf}
    kept = sum(len(node.own) for node in expected)
    orders: dict[str, list[PrefixNode]] = {}  # a tenant's nodes, in the order in which they may go
    late = [node for node in used if node.expected_until < now]
    for head in [*late, *used]:
        while head in used and is_evictable(head):
            node = head
            if head in expected and kept <= EXPECTED_SHARE * allocator.slots:
                if head.tenant not in orders:
                    own = [each for each in used if each.tenant == head.tenant]
                    orders[head.tenant] = sorted(own, key=lambda each: -each.expected_until)
                own = orders[head.tenant]
                node = next(each for each in own if each in used and is_evictable(each))
                own.remove(node)
            if node in expected:
                expected.remove(node)
                kept -= len(node.own)
            yield node
