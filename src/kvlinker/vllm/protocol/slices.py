"""A link order cut into slices that fit into engine steps: what to place and what to compute next."""

from __future__ import annotations

from dataclasses import dataclass

from kvlinker.vllm.protocol.transfer_plan import LinkOrder


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """Tokens [first, last) of the chunk of placement number ``placement``."""

    placement: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Slice:
    """What one engine step does of one request's order: place, then compute ``runs`` of positions.

    ``is_last``: the order is fulfilled with it.
    """

    request_id: str
    parts: tuple[PlacedPart, ...]
    runs: tuple[tuple[int, int], ...]
    is_last: bool


@dataclass(slots=True)
class Budget:
    """What is left of a step: ``tokens`` to compute (or ``placed_per_computed`` times as many to place), and ``runs``,
    which are sequences to vLLM's attention. ``placed`` and ``computed``: tokens that were taken."""

    tokens: float
    runs: int
    placed_per_computed: float
    placed: float = 0.0
    computed: float = 0.0

    @property
    def spent(self) -> bool:
        return self.tokens < 1 or self.runs < 1

    @classmethod
    def unlimited(cls) -> Budget:
        return cls(tokens=1 << 40, runs=1 << 40, placed_per_computed=1.0)

    def place(self, tokens: float) -> None:
        self.placed += tokens
        self.tokens -= tokens / self.placed_per_computed

    def compute(self, tokens: float) -> None:
        self.computed += tokens
        self.tokens -= tokens
        self.runs -= 1


class Progress:
    """How far an order is fulfilled, beginning at position ``begin``: what stands before is there already.

    ``share``: of what a token costs in all layers, its own costs so much.
    """

    def __init__(self, request_id: str, order: LinkOrder, *, begin: int = 0, share: float = 1.0) -> None:
        self._request_id = request_id
        self._share = share
        self._parts = [
            PlacedPart(index, max(placed.first, begin - placed.start), placed.last)
            for index, placed in enumerate(order.placements)
            if placed.end > begin
        ]
        self._runs = [(max(first, begin), last) for first, last in order.runs if last > begin]

    def cost(self, budget: Budget) -> float:
        """Of all that is left, in the budget's tokens."""
        placed = sum(part.last - part.first for part in self._parts)
        return self._share * (sum(end - begin for begin, end in self._runs) + placed / budget.placed_per_computed)

    def fits(self, budget: Budget) -> bool:
        """Whether the budget has room for all that is left."""
        return self.cost(budget) <= budget.tokens and len(self._runs) <= budget.runs

    def take(self, budget: Budget) -> Slice:
        """As much as the budget has room for, which becomes less by it: placements first, then runs in order, so that
        every token that is computed finds all that stands before it. A run may be cut."""
        parts = []
        while self._parts and not budget.spent:
            part = self._parts[0]
            last = min(part.last, part.first + int(budget.tokens * budget.placed_per_computed / self._share))
            parts.append(PlacedPart(part.placement, part.first, last))
            budget.place((last - part.first) * self._share)
            if last == part.last:
                self._parts.pop(0)
            else:
                self._parts[0] = PlacedPart(part.placement, last, part.last)
        runs = []
        while not self._parts and self._runs and not budget.spent:
            begin, end = self._runs[0]
            stop = min(end, begin + int(budget.tokens / self._share))
            runs.append((begin, stop))
            budget.compute((stop - begin) * self._share)
            if stop == end:
                self._runs.pop(0)
            else:
                self._runs[0] = (stop, end)
        return Slice(self._request_id, tuple(parts), tuple(runs), is_last=not (self._parts or self._runs))
