"""Lends requests the blocks that windowed layers need while a prompt is linked: vLLM gives them
blocks for the last window alone, but recomputed tokens, and chunks that are computed, have windows
anywhere in the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

from kvlinker_vllm.protocol.steps import NO_BLOCK
from kvlinker_vllm.protocol.transfer_plan import TransferPlan

if TYPE_CHECKING:  # which loads vLLM
    from kvlinker_vllm.adapter import BlockPool, CacheGroup

BlockIds = tuple[tuple[int, ...], ...]
"""A request's blocks by group, ``NO_BLOCK`` where it has none."""


class Room(Enum):
    """Says when a request has room for its linking: at once, once others have given back blocks, or
    not at all."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


class WindowBlocks:
    """Keeps the blocks that requests have borrowed until they are given back."""

    def __init__(self, groups: Sequence[CacheGroup], pool: BlockPool) -> None:
        self._groups = groups
        self._pool = pool
        self._borrowed: dict[str, list[Any]] = {}

    @property
    def are_needed(self) -> bool:
        """True if layers are in several groups, or have windows, so that vLLM gives some fewer
        blocks than others."""
        return len(self._groups) > 1 or any(group.window is not None for group in self._groups)

    def room_for(self, plan: TransferPlan, begin: int, tokens: int) -> Room:
        """Return when there are blocks for a request of ``tokens``, of which vLLM has the first
        ``begin``, and for its linking: now, later, or never."""
        wanted = 0
        for group in self._groups:
            size, last = group.block_size, -(-tokens // group.block_size)
            first = begin // size
            if group.window is not None:
                first = max(first, (plan.linked - group.window) // size)
                wanted += sum(block < first for block in _needed_blocks(group, plan, begin))
            wanted += last - first
        if wanted <= self._pool.free:
            return Room.NOW
        return Room.LATER if wanted <= self._pool.total else Room.NEVER

    def complete(
        self,
        request_id: str,
        plan: TransferPlan,
        begin: int,
        held: Sequence[Sequence[int]],
        request: Any,
    ) -> BlockIds | None:
        """Return the request's blocks, those that it ``held`` and what its linking from ``begin``
        on needs besides, which it keeps until ``release``; None if there are none left."""
        complete = [list(ids) for ids in held]
        before: list[tuple[int, int]] = []  # groups and blocks that vLLM has cached
        behind: list[tuple[int, int]] = []
        for number, group in enumerate(self._groups):
            for block in _needed_blocks(group, plan, begin):
                if complete[number][block] == NO_BLOCK:
                    cached = block * group.block_size < begin
                    (before if cached else behind).append((number, block))
        borrowed = self._borrowed.setdefault(request_id, [])
        first = len(borrowed)
        if before:
            prefix = self._pool.prefix(request, begin)
            if prefix is None:
                return None
            borrowed += [prefix[number][block] for number, block in before]
            self._pool.hold(borrowed[first:])
        if len(behind) > self._pool.free:
            return None
        borrowed += self._pool.borrow(len(behind))
        for (number, block), own in zip((*before, *behind), borrowed[first:], strict=True):
            complete[number][block] = own.block_id
        return tuple(map(tuple, complete))

    def release(self, request_id: str) -> None:
        """Give back the blocks that the request has borrowed."""
        borrowed = self._borrowed.pop(request_id, None)
        if borrowed:
            self._pool.give_back(borrowed)


def _needed_blocks(group: CacheGroup, plan: TransferPlan, begin: int) -> list[int]:
    """Return the numbers of the blocks that are computed from ``begin`` on, and of those that the
    computed tokens see."""
    if group.window is None:
        return []
    needed: set[int] = set()
    for first, last in plan.runs:
        if last > begin:
            seen = max(0, max(first, begin) - group.window + 1)
            needed.update(range(seen // group.block_size, -(-last // group.block_size)))
    return sorted(needed)
