import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.pool import KVPool, SlotAllocator, SlotRange

SLOTS = 40


class AllocatorMachine(RuleBasedStateMachine):
    """Ranges never overlap, and the KV in them survives whatever happens to the others."""

    def __init__(self):
        super().__init__()
        layers = [LayerShape(query_heads=2, kv_heads=1, key_dim=2, value_dim=2, rotary=None)]
        self.pool = KVPool(layers, SLOTS, dtype=torch.float32, device=torch.device("cpu"))
        self.allocator = SlotAllocator(SLOTS)
        self.held = []
        self.stamp = 0.0

    def fill(self, held):
        self.stamp += 1
        self.pool.keys[0][:, held.start : held.end] = self.stamp
        self.pool.values[0][:, held.start : held.end] = -self.stamp
        return self.stamp

    def follow(self):
        for move in self.allocator.take_moves():
            self.pool.move(*move)
        assert self.allocator.take_moves() == ()

    @rule(size=st.integers(1, SLOTS))
    def allocate(self, size):
        free = self.allocator.free
        held = self.allocator.allocate(size)
        self.follow()
        assert (held is None) == (free < size)
        if held is not None:
            assert held.size == size
            self.held.append((held, self.fill(held)))

    @rule(data=st.data())
    def release(self, data):
        if self.held:
            held, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
            self.allocator.release(held)

    @rule(data=st.data(), extra=st.integers(1, 10))
    def grow(self, data, extra):
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            held, stamp = self.held[index]
            size, free = held.size, self.allocator.free
            grown = self.allocator.grow(held, size + extra)
            self.follow()
            if grown is None:
                assert held.size == size
                assert free < size + extra
            else:
                assert grown.size == size + extra
                assert (self.pool.keys[0][:, grown.start : grown.start + size] == stamp).all()
                self.held[index] = (grown, self.fill(grown))

    @rule()
    def compact(self):
        self.allocator.compact()
        self.follow()
        assert len(self.allocator._gaps()) <= 1

    @invariant()
    def contents_survive(self):
        self.allocator.check_integrity()
        assert self.allocator.used == sum(held.size for held, _ in self.held)
        for held, stamp in self.held:
            assert (self.pool.keys[0][:, held.start : held.end] == stamp).all()
            assert (self.pool.values[0][:, held.start : held.end] == -stamp).all()


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def allocated(allocator: SlotAllocator, size: int) -> SlotRange:
    """Return a range of ``size`` slots, for which there must be room."""
    held = allocator.allocate(size)
    assert held is not None
    return held


def test_the_smallest_gap_that_fits_is_taken():
    allocator = SlotAllocator(100)
    held = [allocated(allocator, size) for size in (10, 20, 10, 5, 10)]
    allocator.release(held[1])
    allocator.release(held[3])
    assert allocated(allocator, 4).start == 40


def test_what_grows_stays_where_it_is_if_it_can():
    allocator = SlotAllocator(100)
    first, second = allocated(allocator, 10), allocated(allocator, 10)
    assert allocator.grow(second, 30) is second
    assert allocator.take_moves() == ()
    grown = allocator.grow(first, 20)
    assert grown is not None
    assert grown.start == 40
    assert allocator.take_moves() == ((0, 40, 10),)


def test_integrity_checks_can_fail():
    allocator = SlotAllocator(10)
    first, _ = allocated(allocator, 4), allocated(allocator, 4)
    first.size = 6
    with pytest.raises(AssertionError):
        allocator.check_integrity()
