"""Lends requests the blocks that windowed layers need while a prompt is linked: vLLM gives them
blocks for the last window alone, but recomputed tokens, and chunks that are computed, have windows
anywhere in the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

from kvlinker.engines.vllm.protocol.steps import NO_BLOCK
from kvlinker.engines.vllm.protocol.transfer_plan import TransferPlan

BlockIds = tuple[tuple[int, ...], ...]
"""A request's blocks by group, ``NO_BLOCK`` where it has none."""


class Room(Enum):
    """Says when a request has room for its linking: at once, once others have given back blocks, or
    not at all."""

    NOW = auto()
    LATER = auto()
    NEVER = auto()


class Group(Protocol):
    """Layers whose KV is in the same blocks; see ``CacheGroup``."""

    @property
    def block_size(self) -> int: ...

    @property
    def window(self) -> int | None: ...


class Pool(Protocol):
    """vLLM's blocks; see ``BlockPool``."""

    @property
    def total(self) -> int: ...

    @property
    def free(self) -> int: ...

    def borrow(self, count: int) -> list[Any]: ...

    def prefix(self, request: Any, tokens: int) -> tuple[Sequence[Any], ...] | None: ...

    def hold(self, blocks: Sequence[Any]) -> None: ...

    def give_back(self, blocks: Sequence[Any]) -> None: ...


class WindowBlocks:
    """Keeps the blocks that requests have borrowed until they are given back."""

    def __init__(self, groups: Sequence[Group], pool: Pool) -> None:
        self._groups = groups
        self._pool = pool
        self._borrowed: dict[str, list[Any]] = {}

    @property
    def are_needed(self) -> bool:
        """True if layers are in several groups, or have windows, so that vLLM gives some fewer
        blocks than others."""
        return len(self._groups) > 1 or any(group.window is not None for group in self._groups)

    def room_for(self, plan: TransferPlan, begin: int, tokens: int) -> Room:
        """Say whether there are blocks for a request of so many tokens, of which vLLM has the first
        ``begin``, and for its linking besides."""
        wanted = 0
        for group in self._groups:
            size, last = group.block_size, -(-tokens // group.block_size)
            first = begin // size
            if group.window is not None:
                first = max(first, (plan.linked - group.window) // size)
                wanted += sum(block < first for block in _needed(group, plan, begin))
            wanted += last - first
        if wanted <= self._pool.free:
            return Room.NOW
        return Room.LATER if wanted <= self._pool.total else Room.NEVER

    def completed(
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
        missing = [
            [block for block in _needed(group, plan, begin) if ids[block] == NO_BLOCK]
            for group, ids in zip(self._groups, complete, strict=True)
        ]
        before = [
            [block for block in blocks if block * group.block_size < begin]
            for group, blocks in zip(self._groups, missing, strict=True)
        ]
        borrowed = self._borrowed.setdefault(request_id, [])
        if any(before):
            prefix = self._pool.prefix(request, begin)
            if prefix is None:
                return None
            for ids, blocks, cached in zip(complete, before, prefix, strict=True):
                own = [cached[block] for block in blocks]
                self._pool.hold(own)
                borrowed += own
                _fill(ids, blocks, own)
        behind = [
            sorted(set(blocks) - set(earlier))
            for blocks, earlier in zip(missing, before, strict=True)
        ]
        if sum(map(len, behind)) > self._pool.free:
            return None
        for ids, blocks in zip(complete, behind, strict=True):
            own = self._pool.borrow(len(blocks))
            borrowed += own
            _fill(ids, blocks, own)
        return tuple(map(tuple, complete))

    def release(self, request_id: str) -> None:
        """Give back the blocks that the request has borrowed."""
        borrowed = self._borrowed.pop(request_id, None)
        if borrowed:
            self._pool.give_back(borrowed)


def _needed(group: Group, plan: TransferPlan, begin: int) -> list[int]:
    """Return the numbers of the blocks that are computed from ``begin`` on, or seen by what is."""
    if group.window is None:
        return []
    needed: set[int] = set()
    for first, last in plan.runs:
        if last > begin:
            seen = max(0, max(first, begin) - group.window + 1)
            needed.update(range(seen // group.block_size, -(-last // group.block_size)))
    return sorted(needed)


def _fill(ids: list[int], blocks: Iterable[int], own: Sequence[Any]) -> None:
    for block, each in zip(blocks, own, strict=True):
        ids[block] = each.block_id
