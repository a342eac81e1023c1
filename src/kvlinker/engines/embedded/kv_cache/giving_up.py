"""Decides which prefixes are given up next for their slots."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator

from kvlinker.engines.embedded.kv_cache.pool import SlotAllocator
from kvlinker.engines.embedded.kv_cache.prefix_node import PrefixNode

EXPECTED_SHARE = 0.5
"""The most of the pool's slots that prefixes which are expected may keep from others of their
tenant."""


def given_up_next(
    used: Collection[PrefixNode], allocator: SlotAllocator, now: float
) -> Iterator[PrefixNode]:
    """Yield nodes of ``used``, which are in the pool, the last used one last; each is to be taken
    out of them before the next.

    Prefixes that were expected and not used go first, then those that were used longest ago; where
    it is the turn of one that is expected, the one of its tenant goes that is needed last.
    """

    def may_go(node: PrefixNode) -> bool:
        frees = not node.spans or bool((allocator.users(node.spans) == 1).any())
        return frees and not node.has_children_in_pool

    expected = {node for node in used if now <= node.expected_until < math.inf}
    kept = sum(len(node.own) for node in expected)
    orders: dict[str, list[PrefixNode]] = {}  # a tenant's nodes, in the order in which they may go
    late = [node for node in used if node.expected_until < now]
    for head in [*late, *used]:
        while head in used and may_go(head):
            node = head
            if head in expected and kept <= EXPECTED_SHARE * allocator.slots:
                if head.tenant not in orders:
                    own = [each for each in used if each.tenant == head.tenant]
                    orders[head.tenant] = sorted(own, key=lambda each: -each.expected_until)
                own = orders[head.tenant]
                node = next(each for each in own if each in used and may_go(each))
                own.remove(node)
            if node in expected:
                expected.remove(node)
                kept -= len(node.own)
            yield node
