"""Slots of the pool: handed out and taken back in any order, each with as many users as hold it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.embedded.kv_cache.pool import (
    KVPool,
    SlotAllocator,
    SlotSpan,
    cut,
    slots_of,
)
from tests.properties import examples
from tests.toy_models import loaded_model

SLOTS = 50


class AllocatorMachine(RuleBasedStateMachine):
    """Whatever is allocated, extended, shared and released: nobody's slots are anybody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = SlotAllocator(SLOTS)
        self.held: list[tuple[SlotSpan, ...]] = []

    def taken(self) -> set[int]:
        return {
            slot for spans in self.held for span in spans for slot in range(span.slot, span.end)
        }

    @rule(size=st.integers(1, 30))
    def allocate(self, size: int) -> None:
        before = self.taken()
        spans = self.allocator.allocate(size)
        assert (spans is not None) == (SLOTS - len(before) >= size)
        if spans is not None:
            slots = [slot for span in spans for slot in range(span.slot, span.end)]
            assert len(set(slots)) == len(slots) == size
            assert not before.intersection(slots)
            self.held.append(spans)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), size=st.integers(0, 20))
    def extend(self, data: st.DataObject, size: int) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        *others, last = self.held[index]
        before = self.taken()
        extended = self.allocator.extend(last, size)
        assert extended.slot == last.slot
        assert last.size <= extended.size <= last.size + size
        assert not before.intersection(range(last.end, extended.end))
        assert extended.size == last.size + size or extended.end == SLOTS or extended.end in before
        self.held[index] = (*others, extended)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        spans = data.draw(st.sampled_from(self.held))
        self.allocator.share(spans)
        self.held.append(spans)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        spans = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.allocator.release(spans)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def imagine_a_release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        spans = self.held.pop(index)
        without = self.taken()
        self.held.insert(index, spans)
        assert self.allocator.free_without(spans) == SLOTS - len(without)

    @invariant()
    def counts_agree(self) -> None:
        self.allocator.check_integrity([span for spans in self.held for span in spans])
        assert self.allocator.used == len(self.taken()) == SLOTS - self.allocator.free
        for spans in self.held:
            assert (self.allocator.users(spans) > 0).all()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = examples(100, stateful_step_count=40, deadline=None)


def allocated(allocator: SlotAllocator, size: int) -> tuple[SlotSpan, ...]:
    """Return ``size`` slots, for which there must be room."""
    spans = allocator.allocate(size)
    assert spans is not None
    return spans


def test_the_smallest_gap_that_fits_is_taken() -> None:
    allocator = SlotAllocator(100)
    spans = [allocated(allocator, size) for size in (20, 10, 30, 10, 10)]
    allocator.release(spans[0])
    allocator.release(spans[2])
    assert allocated(allocator, 19) == (SlotSpan(0, 19),)
    assert allocated(allocator, 25) == (SlotSpan(30, 25),)


def test_gaps_are_filled_where_none_is_large_enough() -> None:
    allocator = SlotAllocator(100)
    spans = [allocated(allocator, 10) for _ in range(10)]
    for released in spans[1::2]:
        allocator.release(released)
    assert allocated(allocator, 25) == (SlotSpan(10, 10), SlotSpan(30, 10), SlotSpan(50, 5))
    assert allocator.allocate(26) is None
    assert allocator.free == 25


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_pool_holds_zeros_at_first(dtype: torch.dtype) -> None:
    layers = loaded_model("llama").layers
    pool = KVPool(layers, 33, dtype=dtype, device=torch.device("cpu"))
    for tensor, shape in zip(pool.keys, layers, strict=True):
        assert tensor.shape == (shape.kv_heads, 33, shape.key_dim)
        assert tensor.dtype == dtype
        assert not tensor.any()
        tensor += 1
    assert not any(tensor.any() for tensor in pool.values)


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    begin=st.integers(0, 20),
    size=st.integers(1, 9),
)
def test_slots_that_are_cut_out_are_a_part_of_all(sizes, begin, size):
    spans = [SlotSpan(100 * (index + 1), each) for index, each in enumerate(sizes)]
    begin = min(begin, sum(sizes) - 1)
    expected = slots_of(spans)[begin : begin + size]
    assert slots_of(cut(spans, begin, begin + size)).tolist() == expected.tolist()


@pytest.mark.parametrize("slots", [10**14, 10**30])
def test_a_pool_beyond_the_memory(slots: int) -> None:
    layers = loaded_model("llama").layers
    with pytest.raises(ModelLoadError, match=f"{slots:,} tokens.* Lower kv_slots"):
        KVPool(layers, slots, dtype=torch.float32, device=torch.device("cpu"))
