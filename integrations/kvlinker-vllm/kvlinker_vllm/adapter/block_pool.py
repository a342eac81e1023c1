"""The scheduler side's access to vLLM's blocks: it forgets cached ones, borrows free ones, and
holds those that a prefix has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BlockPool:
    """Lends blocks of vLLM's KV cache manager. Borrowers return them."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    @property
    def total(self) -> int:
        """The number of blocks, without the null block."""
        return int(self._manager.block_pool.num_gpu_blocks) - 1

    @property
    def free(self) -> int:
        """The number of free blocks."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def borrow(self, count: int) -> list[Any]:
        """Take ``count`` free blocks. The caller checks that there are as many."""
        blocks: list[Any] = self._manager.block_pool.get_new_blocks(count)
        return blocks

    def prefix(self, request: Any, tokens: int) -> tuple[Sequence[Any], ...] | None:
        """Return the cached blocks, by group, of a request's first ``tokens``, null blocks where a
        group has none; None if vLLM has others of them by now."""
        found, count, *_ = self._manager.get_computed_blocks(request)
        return tuple(found.blocks) if count == tokens else None

    def hold(self, blocks: Sequence[Any]) -> None:
        """Borrow blocks that others may use, too."""
        self._manager.block_pool.touch(blocks)

    def give_back(self, blocks: Sequence[Any]) -> None:
        """Return borrowed and held blocks."""
        self._manager.block_pool.free_blocks(blocks)


def forget_prefix(manager: Any, request: Any) -> None:
    """Evict the blocks that vLLM's KV cache manager would reuse for the request."""
    blocks, *_ = manager.get_computed_blocks(request)
    manager.evict_blocks({block for group in blocks.get_block_ids() for block in group})
