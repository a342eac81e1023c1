"""The connector's scheduler side: which requests are linked, in which blocks, and what each engine step does of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlinker.errors import InvalidRequestError
from kvlinker.vllm.metadata import Begun, StepOrders, StepReport
from kvlinker.vllm.order import PARAM, LinkOrder, Outcome
from kvlinker.vllm.order_seal import OrderSeal
from kvlinker.vllm.pace import PLACED_PER_COMPUTED, SLOWDOWN, StepPace, StepWork
from kvlinker.vllm.slices import Budget, Progress, Slice

logger = logging.getLogger(__name__)

COMPARED_LAYERS = 2
"""What orders that compare compute, about."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """``slice_tokens``: the most that a step computes of orders while other requests are being computed, which take
    ``slowdown`` times as long then, on average (see ``StepPace``); ``step_tokens``: if there are none. ``runs``:
    sequences that attention takes at once. ``workers``: how many report. ``layers``: the model's, of which orders that
    compare compute the first ones only."""

    slice_tokens: int
    step_tokens: int
    runs: int
    layers: int
    workers: int = 1
    slowdown: float = SLOWDOWN


class LinkingScheduler:
    """One thread, vLLM's engine core, calls everything."""

    def __init__(self, *, limits: StepLimits, seal: OrderSeal, is_stored: Callable[[str], bool]) -> None:
        """``is_stored`` tells whether a chunk's KV is in the store's folder."""
        self._seal = seal
        self._limits = limits
        self._is_stored = is_stored
        self._orders: dict[str, LinkOrder] = {}
        self._own: dict[str, int] = {}  # tokens that vLLM computes itself in their first step
        self._admitted: dict[str, float] = {}  # when they came
        self._queued: dict[str, float] = {}  # seconds until vLLM began with them
        self._deviations: dict[str, bytes] = {}
        self._given_up: set[str] = set()  # their chunks vanished: vLLM computes them
        self._begun: list[Begun] = []  # for the next step
        self._waiting: dict[str, Progress] = {}  # vLLM holds these requests back until their orders are fulfilled
        self._loaded: dict[str, int] = {}  # of these, workers that have all chunks at hand
        self._ordered: set[str] = set()  # of these, those whose last slice is under way
        self._dropped: list[str] = []
        self._at_hand: set[str] = set()  # chunks that all workers had in memory, as far as is known
        self._busy = False
        self._pace = StepPace(limits.slice_tokens, slowdown=limits.slowdown)

    def admit(
        self, request_id: str, params: Mapping[str, Any] | None, tokens: Sequence[int], *, salt: str | None
    ) -> None:
        """A request for a prompt of these tokens has come. What it asks for is refused, and the request computed by
        vLLM alone, if it is not sound, or not salted: its KV would be taken for that of the plain tokens."""
        try:
            order = self._seal.order(params, tokens)
        except InvalidRequestError as error:
            logger.warning("Request %s is not linked: %s", request_id, error)
            return
        if order is None:
            return
        if not salt:
            logger.warning("Request %s is not linked: it has no cache_salt, which every linked one needs.", request_id)
            return
        self._orders[request_id] = order
        self._own[request_id] = len(tokens) - order.linked
        self._admitted[request_id] = time.perf_counter()

    def matched(self, request_id: str, local: int) -> tuple[int, bool]:
        """Tokens that linking brings beyond the ``local`` ones that vLLM has, and whether the request has to wait.

        Without side effects, but that a chunk that has vanished makes it 0 from now on.
        """
        order = self._orders.get(request_id)
        if order is None or request_id in self._given_up or local >= order.linked:
            return 0, False
        missing = [key for key in order.keys if not self._is_stored(key)]
        if missing:
            logger.warning("Request %s is computed in full: chunk %s is gone.", request_id, missing[0])
            self._given_up.add(request_id)
            return 0, False
        return order.linked - local, self._has_to_wait(order, request_id, local)

    def allocated(self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int], *, external: int) -> None:
        """vLLM has given the request its blocks, and counts on ``external`` tokens of linking."""
        if request_id in self._admitted:
            self._queued.setdefault(request_id, time.perf_counter() - self._admitted[request_id])
        if not external:
            return
        order = self._orders[request_id]
        self._own[request_id] = len(tokens) - order.linked
        begin = order.linked - external
        waits = self._has_to_wait(order, request_id, begin)
        self._begun.append(
            Begun(
                request_id=request_id,
                order=order,
                tokens=np.asarray(tokens[: order.linked], dtype=np.int64),
                block_ids=tuple(block_ids),
                begin=begin,
                waits=waits,
            )
        )
        if waits:
            self._waiting[request_id] = self._progress(request_id, begin)

    def orders(self, *, scheduled_tokens: int) -> StepOrders:
        """What the workers do in the step that computes so many tokens otherwise."""
        begun = tuple(self._begun)
        own = Budget.unlimited()
        slices = [self._progress(each.request_id, each.begin).take(own) for each in begun if not each.waits]
        self._busy = scheduled_tokens > 0
        if not self._waiting:
            self._pace.rest()
        budget = self._budget()
        slices += self._next_slices(budget)
        self._pace.planned(StepWork(own.placed + budget.placed, own.computed + budget.computed, scheduled_tokens))
        dropped = tuple(self._dropped)
        self._begun.clear()
        self._dropped.clear()
        return StepOrders(begun, tuple(slices), dropped, idle=not self._busy)

    def note_report(self, report: StepReport | None) -> None:
        """A step is done; what the workers told of it, if anything."""
        self._pace.ended()
        if report is None:
            return
        for request_id, workers in report.loaded.items():
            if request_id in self._waiting:
                self._loaded[request_id] = self._loaded.get(request_id, 0) + workers
                if self._loaded[request_id] >= self._limits.workers:
                    self._at_hand.update(self._orders[request_id].keys)
        self._at_hand -= report.evicted
        for request_id in report.failed & self._orders.keys():
            self._given_up.add(request_id)
            self._at_hand.difference_update(self._orders[request_id].keys)
        for request_id in report.deviations.keys() & self._orders.keys():
            self._deviations[request_id] = report.deviations[request_id]

    def note_received(self, finished: Iterable[str]) -> None:
        """The orders of these requests are fulfilled, or given up."""
        for request_id in finished:
            self._forget_progress(request_id)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The request has ended, or was aborted; what its output tells of linking."""
        order = self._orders.pop(request_id, None)
        if request_id in self._waiting:
            self._dropped.append(request_id)
            self._forget_progress(request_id)
        self._own.pop(request_id, None)
        self._admitted.pop(request_id, None)
        outcome = Outcome(
            linked=request_id not in self._given_up,
            queued=self._queued.pop(request_id, 0.0),
            deviation=self._deviations.pop(request_id, None),
        )
        self._given_up.discard(request_id)
        return None if order is None else {PARAM: outcome.model_dump(exclude_none=True)}

    def _has_to_wait(self, order: LinkOrder, request_id: str, local: int) -> bool:
        """Orders are fulfilled within the request's own first step only if that takes not much longer by it."""
        if order.captures or order.compares or not self._at_hand.issuperset(order.keys):
            return True
        progress, budget = self._progress(request_id, local), self._budget()
        if self._busy and progress.cost(budget) + self._own[request_id] > budget.tokens:
            return True
        return not progress.fits(budget)

    def _budget(self) -> Budget:
        """For the next step, going by whether it holds anything else."""
        if self._busy:
            return Budget(self._pace.tokens, self._limits.runs, self._pace.placed_per_computed)
        return Budget(self._limits.step_tokens, self._limits.runs, PLACED_PER_COMPUTED)

    def _progress(self, request_id: str, begin: int) -> Progress:
        order = self._orders[request_id]
        share = COMPARED_LAYERS / max(self._limits.layers, COMPARED_LAYERS) if order.compares else 1.0
        return Progress(request_id, order, begin=begin, share=share)

    def _next_slices(self, budget: Budget) -> list[Slice]:
        slices = []
        for request_id, progress in self._waiting.items():
            if budget.spent:
                break
            ready = self._loaded.get(request_id, 0) >= self._limits.workers
            if not ready or request_id in self._ordered:
                continue
            if self._busy and progress.fits(budget):
                rest = progress.cost(budget) + self._own[request_id]
                if not self._pace.may_end(rest):
                    continue
            part = progress.take(budget)
            slices.append(part)
            if part.is_last:
                self._ordered.add(request_id)
        return slices

    def _forget_progress(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._loaded.pop(request_id, None)
        self._ordered.discard(request_id)
