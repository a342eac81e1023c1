"""Messages between the connector's scheduler side and its workers in every engine step; transfer
plans are cut into slices that fit into steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker_vllm.protocol.transfer_plan import TransferPlan

NO_BLOCK = 0
"""The number in place of a block that a request does not have."""


@dataclass(frozen=True, slots=True)
class StartedTransfer:
    """The start of a request's transfer plan, in the KV cache's blocks ``block_ids``, by group of
    layers, ``NO_BLOCK`` where a group needs none. Without any group, it cannot be linked."""

    request_id: str
    plan: TransferPlan

    tokens: NDArray[np.int64]
    """The prompt's first ``plan.linked`` tokens: [linked]."""

    block_ids: tuple[tuple[int, ...], ...]

    begin: int
    """The first position to link: the KV before it is there already."""

    waits: bool
    """True if the request waits until the workers report the end; False if the transfer is part of
    this very step."""


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The tokens [first, last) of the chunk of placement number ``placement``."""

    placement: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class TransferSlice:
    """The part of one request's transfer plan in one engine step: place ``parts``, then compute
    ``runs``."""

    request_id: str
    parts: tuple[PlacedPart, ...]
    runs: tuple[tuple[int, int], ...]

    is_last: bool
    """True if this slice completes the plan."""

    begins_again: bool = False
    """True if the prompt has been computed without its unrelated text, and this slice is the first
    one with it."""

    def is_whole(self, plan: TransferPlan) -> bool:
        """Return whether this slice is all of the plan."""
        placed = sum(part.last - part.first for part in self.parts)
        return self.runs == plan.runs and placed == sum(
            each.last - each.first for each in plan.placements
        )


@dataclass(frozen=True, slots=True)
class StepTransfers:
    """The workers' tasks in one step: each does exactly these, in this order, since they compute
    together."""

    started: tuple[StartedTransfer, ...] = ()
    slices: tuple[TransferSlice, ...] = ()
    aborted: tuple[str, ...] = ()

    idle: bool = False
    """True if nothing else is computed in the step, so that workers may wait a little for chunks
    that are being loaded."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """The workers' report of one step."""

    loaded: Mapping[str, int] = field(default_factory=dict)
    """The number of workers that have all of a request's chunks in memory since this step, by
    request."""

    failed: frozenset[str] = frozenset()
    """The requests whose linking failed."""

    held: frozenset[tuple[str, int]] = frozenset()
    """The chunks that came into a worker's memory in this step, each with the worker's rank."""

    evicted: frozenset[tuple[str, int]] = frozenset()
    """The chunks that left a worker's memory, each with the worker's rank."""

    measured: Mapping[str, bytes] = field(default_factory=dict)
    """The measurements in bytes of requests whose plans have one and have ended."""

    def join(self, other: StepReport) -> StepReport:
        """Join the reports of two groups of workers."""
        names = {*self.loaded, *other.loaded}
        loaded = {name: self.loaded.get(name, 0) + other.loaded.get(name, 0) for name in names}
        measured = {**self.measured, **other.measured}
        held, evicted = self.held | other.held, self.evicted | other.evicted
        return StepReport(loaded, self.failed | other.failed, held, evicted, measured)


@dataclass(slots=True)
class StepBudget:
    """The room for linking in one step, and how much of it was taken so far."""

    tokens: float
    """The tokens that may be computed, or ``placed_per_computed`` times as many placed."""

    runs: int
    """The number of ranges that may be computed: each is a sequence to vLLM's attention."""

    placed_per_computed: float
    placed: float = 0.0
    computed: float = 0.0

    @classmethod
    def unlimited(cls) -> StepBudget:
        """Return a budget that has room for everything."""
        return cls(tokens=1 << 40, runs=1 << 40, placed_per_computed=1.0)

    @property
    def spent(self) -> bool:
        """True if there is no room for another token."""
        return self.tokens < 1 or self.runs < 1

    @property
    def placeable(self) -> float:
        """The tokens that may still be placed."""
        return self.tokens * self.placed_per_computed

    def place(self, tokens: float) -> None:
        """Take room for ``tokens`` to place."""
        self.placed += tokens
        self.tokens -= tokens / self.placed_per_computed

    def compute(self, tokens: float) -> None:
        """Take room for a run of ``tokens`` to compute."""
        self.computed += tokens
        self.tokens -= tokens
        self.runs -= 1


class TransferProgress:
    """The remaining part of a transfer plan, from position ``begin`` on. KV before it is there
    already; a second pass computes all of its runs again."""

    def __init__(
        self, request_id: str, plan: TransferPlan, *, begin: int = 0, share: float = 1.0
    ) -> None:
        """``share`` is the cost of one token here, as a share of its cost in all layers."""
        self._request_id = request_id
        self._share = share
        self._parts = [
            PlacedPart(index, max(placed.first, begin - placed.start), placed.last)
            for index, placed in enumerate(plan.placements)
            if placed.end > begin
        ]
        computed_from = 0 if plan.second_pass else begin
        self._runs = [
            (max(first, computed_from), last) for first, last in plan.runs if last > computed_from
        ]
        self._again: list[tuple[int, int]] = []  # where the prompt begins again
        self._begins_again = False
        if plan.alone is not None:
            self._runs, self._again = list(plan.alone.runs), self._runs

    def cost(self, budget: StepBudget) -> float:
        """Return the cost of all that is left, in the budget's tokens."""
        placed = sum(part.last - part.first for part in self._parts)
        computed = sum(end - begin for begin, end in (*self._runs, *self._again))
        return self._share * (computed + placed / budget.placed_per_computed)

    def fits(self, budget: StepBudget) -> bool:
        """Return whether one slice within the budget does all that is left."""
        return (
            not self._again
            and self.cost(budget) <= budget.tokens
            and len(self._runs) <= budget.runs
        )

    def take(self, budget: StepBudget) -> TransferSlice:
        """Return as much as the budget has room for, and take it out of the budget.

        Placements come first, then runs in order, so that the tokens before a computed one are
        always there. A run may be cut. Where the prompt begins again, a slice ends.
        """
        begins_again, self._begins_again = self._begins_again, False
        parts = []
        while self._parts and (room := _whole(budget.placeable / self._share)):
            part = self._parts[0]
            last = min(part.last, part.first + room)
            parts.append(PlacedPart(part.placement, part.first, last))
            budget.place((last - part.first) * self._share)
            if last == part.last:
                self._parts.pop(0)
            else:
                self._parts[0] = PlacedPart(part.placement, last, part.last)
        runs = []
        while not self._parts and self._runs and budget.runs:
            room = _whole(budget.tokens / self._share)
            if not room:
                break
            begin, end = self._runs[0]
            stop = min(end, begin + room)
            runs.append((begin, stop))
            budget.compute((stop - begin) * self._share)
            if stop == end:
                self._runs.pop(0)
            else:
                self._runs[0] = (stop, end)
        if self._again and not (self._parts or self._runs):
            self._runs, self._again, self._begins_again = self._again, [], True
        is_last = not (self._parts or self._runs)
        return TransferSlice(self._request_id, tuple(parts), tuple(runs), is_last, begins_again)


def _whole(tokens: float) -> int:
    """Return the whole tokens in a room that sums and quotients have made a little smaller."""
    return max(0, int(tokens + 1e-6))
