"""Prefixes that are expected to be used again are given up last of their tenant's, and first when
they are late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvlinker.engines.embedded.kv_cache.paths import SequencePath
from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator
from kvlinker.engines.embedded.kv_cache.prefix_node import PrefixNode
from kvlinker.engines.embedded.kv_cache.prefixes import PrefixTree, eviction_order
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import FreshSegment, Prompt
from tests.engines.embedded.conftest import random_tokens

TOKENS = 20
FULL = parse_policy("full")


class Pool:
    """A full pool of prefixes of ``TOKENS`` tokens each, in the order in which they were used, on a
    clock that stands until it is moved."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        """``tenants`` has the tenant of each prefix by name."""
        self.now = 0.0
        self.tenants = tenants
        self.allocator = SlotAllocator(TOKENS * len(tenants))
        self.tree = PrefixTree(self.allocator, clock=lambda: self.now)
        self.prompts = {
            name: Prompt((FreshSegment(random_tokens(TOKENS, number)),))
            for number, name in enumerate(tenants)
        }
        for name in tenants:
            self.use(name)

    def use(self, name: str) -> None:
        tokens = self.prompts[name].tokens
        spans = self.allocator.allocate(TOKENS)
        assert spans is not None
        self.tree.insert(SequencePath(self.tenants[name], tokens), np.arange(TOKENS), spans)
        self.allocator.release(spans)

    def expect(self, name: str, seconds: float) -> None:
        self.tree.expect(self.tenants[name], self.prompts[name], (), FULL, seconds)

    def find(self, name: str) -> bool:
        return bool(self.tree.find(self.tenants[name], self.prompts[name], (), FULL))

    def left(self, given_up: int) -> str:
        """Give so many up; returns the names of those that are left, in order of use."""
        self.tree.evict(self.allocator.free + given_up * TOKENS)
        there = {tuple(node.items.tolist()) for node in self.tree._used}
        return "".join(
            name for name, prompt in self.prompts.items() if tuple(prompt.tokens) in there
        )


def test_what_is_expected_stays_and_its_tenant_pays() -> None:
    pool = Pool({"a": "one", "b": "two", "c": "one", "d": "two", "e": "one"})
    pool.expect("a", 9)
    pool.expect("c", 5)
    assert pool.left(1) == "abcd"
    assert pool.left(1) == "bcd", "of two that are expected, the one that is due later"
    assert pool.left(1) == "cd", "others have their turns"
    assert pool.left(1) == "d", "nothing else of its tenant is left, and others do not pay"


def test_what_came_back_or_is_late_is_expected_no_more() -> None:
    pool = Pool(dict.fromkeys("abcd", "one"))
    pool.expect("a", 9)
    assert pool.find("a")
    assert pool.left(1) == "acd", "it was used last"
    pool.expect("d", 5)
    pool.now = 6
    assert pool.left(1) == "ac", "late ones go first"


def test_what_is_expected_keeps_half_of_the_pool_at_most() -> None:
    pool = Pool(dict.fromkeys("abcd", "one"))
    for name in "abc":
        pool.expect(name, 9)
    assert pool.left(1) == "bcd"
    assert pool.left(1) == "bc"


class Counting(dict[PrefixNode, None]):
    """Counts how often all nodes are looked through."""

    passes = 0

    def __iter__(self) -> Iterator[PrefixNode]:
        self.passes += 1
        return super().__iter__()


def test_all_nodes_are_looked_through_once_for_each_tenant_not_for_each_eviction() -> None:
    """The scheduler's lock is held meanwhile."""
    names = {str(number): ("one", "two", "three")[number % 3] for number in range(60)}
    pool = Pool(names)
    for name in list(names)[:20]:
        pool.expect(name, 5 + int(name))
    used = Counting(pool.tree._used)
    evicted = []
    for node in eviction_order(used, pool.allocator, pool.now):
        del used[node]
        evicted.append(node)
    assert len(evicted) == len(set(evicted)) == 60
    assert used.passes <= 6
