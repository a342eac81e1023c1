"""The blocks that requests borrow for windowed layers, from a pool that only counts."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvlinker_vllm.protocol.transfer_plan import PlacedChunk, TransferPlan
from kvlinker_vllm.scheduler.window_blocks import Room, WindowBlocks

FULL: Any = SimpleNamespace(block_size=16, window=None)
WINDOWED: Any = SimpleNamespace(block_size=16, window=20)
KEY = "0" * 64


class Pool:
    """Counts what is lent; ``cached`` blocks are those of a prefix."""

    def __init__(self, blocks=40, cached=None):
        self.total = blocks
        self.left = list(range(100, 100 + blocks))
        self.cached = cached
        self.held = []

    @property
    def free(self):
        return len(self.left)

    def borrow(self, count):
        return [SimpleNamespace(block_id=self.left.pop(0)) for _ in range(count)]

    def prefix(self, request, tokens):
        return self.cached

    def hold(self, blocks):
        self.held += blocks

    def give_back(self, blocks):
        for block in blocks:
            if block in self.held:
                self.held.remove(block)
            else:
                self.left.append(block.block_id)


def blocks_of(pool: Any, *groups):
    return WindowBlocks(groups or [FULL, WINDOWED], pool)


def plan_of(linked, *runs):
    chunk = PlacedChunk(key=KEY, start=0, first=0, last=linked, rotary_start=0)
    return TransferPlan(linked=linked, placements=(chunk,), runs=runs)


def held_by_vllm(linked):
    """Blocks 1, 2, … of the full group; of the other, the last window's alone."""
    blocks = range(1, 1 + -(-linked // 16))
    skipped = max(0, linked - WINDOWED.window + 1) // 16
    return [list(blocks), [0] * skipped + [50 + block for block in blocks[skipped:]]]


def test_nothing_is_borrowed_where_nothing_is_computed():
    pool = Pool()
    blocks = blocks_of(pool)
    held = held_by_vllm(160)
    assert blocks.complete("r", plan_of(160), 0, held, None) == tuple(map(tuple, held))
    assert pool.free == 40
    blocks.release("r")
    assert pool.free == 40


def test_what_is_computed_gets_its_windows_and_gives_them_back():
    """Positions 80 to 84 see from 61 on: blocks 3 to 5."""
    pool = Pool()
    blocks = blocks_of(pool)
    full, windowed = held_by_vllm(160)
    found = blocks.complete("r", plan_of(160, (80, 85)), 0, [full, windowed], None)
    assert found == (
        tuple(full),
        (0, 0, 0, 100, 101, 102, 0, 0, *windowed[8:]),
    )
    blocks.release("r")
    blocks.release("r")
    assert pool.free == 40


def test_a_chunk_that_is_computed_gets_all_blocks():
    pool = Pool()
    blocks = blocks_of(pool)
    found = blocks.complete("r", plan_of(160, (0, 160)), 0, held_by_vllm(160), None)
    assert found is not None
    assert 0 not in found[1]
    assert pool.free == 40 - 8


def test_windows_that_reach_into_a_cached_prefix_hold_its_blocks():
    cached = tuple([SimpleNamespace(block_id=70 + n) for n in range(5)] for _ in range(2))
    pool = Pool(cached=cached)
    blocks = blocks_of(pool)
    found = blocks.complete("r", plan_of(160, (20, 30), (80, 85)), 80, held_by_vllm(160), None)
    assert found is not None
    assert found[1][:8] == (0, 0, 0, 73, 74, 100, 0, 0)
    assert pool.held == cached[1][3:]
    blocks.release("r")
    assert (pool.free, pool.held) == (40, [])


def test_without_blocks_there_is_no_linking():
    gone = blocks_of(Pool(cached=None))
    assert gone.complete("r", plan_of(160, (80, 85)), 80, held_by_vllm(160), None) is None
    few = Pool(blocks=2)
    blocks = blocks_of(few)
    assert blocks.complete("r", plan_of(160, (80, 85)), 0, held_by_vllm(160), None) is None
    blocks.release("r")
    assert few.free == 2


@pytest.mark.parametrize(
    ("blocks", "taken", "room"),
    [(15, 0, Room.NOW), (16, 1, Room.NOW), (16, 2, Room.LATER), (14, 0, Room.NEVER)],
)
def test_room_is_for_the_request_and_its_linking(blocks, taken, room):
    """Ten blocks of 160 tokens, two of the last window, and three that are lent."""
    pool = Pool(blocks=blocks)
    pool.borrow(taken)
    assert blocks_of(pool).room_for(plan_of(158, (80, 85)), 0, 160) is room


def test_models_without_windows_need_nothing():
    assert not blocks_of(Pool(), FULL).are_needed
    assert blocks_of(Pool(), WINDOWED).are_needed
    assert blocks_of(Pool(), FULL, FULL).are_needed  # vLLM takes no word of single blocks
