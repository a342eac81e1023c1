"""The connector's scheduler side: which requests are linked, in which blocks, and what each engine step does of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlinker.errors import InvalidRequestError
from kvlinker.vllm.protocol.messages import Begun, StepOrders, StepReport
from kvlinker.vllm.protocol.signature import OrderSeal
from kvlinker.vllm.protocol.slices import Budget, Progress, Slice
from kvlinker.vllm.protocol.transfer_plan import COMPARED_LAYER, PARAM, LinkOrder, Outcome
from kvlinker.vllm.scheduler.pace import PLACED_PER_COMPUTED, SLOWDOWN, StepPace, StepWork

logger = logging.getLogger(__name__)


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


@dataclass(slots=True, eq=False)
class _Request:
    """``own``: tokens that vLLM computes itself in its first step. ``admitted``: when it came; ``queued``: seconds
    until vLLM began with it. ``given_up``: a chunk vanished, or linking failed, and vLLM computes it. ``waits``: it is
    not linked within its own first step, as was decided last. ``deviation``: what an order that compares is for.

    ``progress``, while vLLM holds it back; ``loaded``: workers that have all of its chunks then; ``ordered``: its last
    slice is under way.
    """

    order: LinkOrder
    own: int
    admitted: float
    queued: float | None = None
    given_up: bool = False
    waits: bool = True
    deviation: bytes | None = None
    progress: Progress | None = None
    loaded: int = 0
    ordered: bool = False

    @property
    def outcome(self) -> Outcome:
        return Outcome(linked=not self.given_up, queued=self.queued or 0.0, deviation=self.deviation)


class LinkingScheduler:
    """One thread, vLLM's engine core, calls everything."""

    def __init__(self, *, limits: StepLimits, seal: OrderSeal, is_stored: Callable[[str], bool]) -> None:
        """``is_stored`` tells whether a chunk's KV is in the store's folder."""
        self._seal = seal
        self._limits = limits
        self._is_stored = is_stored
        self._requests: dict[str, _Request] = {}
        self._waiting: dict[str, _Request] = {}  # those that vLLM holds back, in the order in which they came
        self._begun: list[Begun] = []  # for the next step
        self._dropped: list[str] = []
        self._held: dict[str, set[int]] = {}  # chunks, and the ranks of workers that have them in memory
        self._busy = False
        self._linked_at_once = 0.0  # tokens, within requests' own first steps, of the next step
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
        self._requests[request_id] = _Request(order, len(tokens) - order.linked, time.perf_counter())

    def matched(self, request_id: str, local: int, tokens: int) -> tuple[int, bool]:
        """How many of a request's ``tokens`` linking brings beyond the ``local`` ones that vLLM has, and whether the
        request has to wait for it.

        Without side effects, but that a chunk that has vanished makes it 0 from now on.
        """
        request = self._requests.get(request_id)
        if request is None or request.given_up or local >= request.order.linked:
            return 0, False
        order = request.order
        missing = [key for key in order.keys if not self._is_stored(key)]
        if missing:
            logger.warning("Request %s is computed in full: chunk %s is gone.", request_id, missing[0])
            request.given_up = True
            return 0, False
        request.own = tokens - order.linked
        request.waits = self._has_to_wait(request, self._progress(request_id, local))
        return order.linked - local, request.waits

    def allocated(self, request_id: str, tokens: Sequence[int], block_ids: Sequence[int], *, external: int) -> None:
        """vLLM has given the request its blocks, and counts on ``external`` tokens of linking, as ``matched`` said."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.queued is None:
            request.queued = time.perf_counter() - request.admitted
        if not external:
            return
        begin = request.order.linked - external
        self._begun.append(
            Begun(
                request_id=request_id,
                order=request.order,
                tokens=np.asarray(tokens[: request.order.linked], dtype=np.int64),
                block_ids=tuple(block_ids),
                begin=begin,
                waits=request.waits,
            )
        )
        progress = self._progress(request_id, begin)
        if request.waits:
            request.progress = progress
            self._waiting[request_id] = request
        else:
            self._linked_at_once += progress.cost(self._budget()) + request.own

    def orders(self, *, scheduled_tokens: int, prefilled_tokens: int) -> StepOrders:
        """What the workers do in the step that computes so many tokens otherwise, some of them of prompts."""
        begun = tuple(self._begun)
        at_once = Budget.unlimited()
        slices = [self._progress(each.request_id, each.begin).take(at_once) for each in begun if not each.waits]
        self._busy = scheduled_tokens > 0
        self._linked_at_once = 0.0
        if not self._waiting:
            self._pace.idle()
        budget = self._budget()
        slices += self._next_slices(budget)
        placed, computed = at_once.placed + budget.placed, at_once.computed + budget.computed
        self._pace.planned(StepWork(placed, computed, prefilled_tokens, self._busy))
        dropped = tuple(self._dropped)
        self._begun.clear()
        self._dropped.clear()
        return StepOrders(begun, tuple(slices), dropped, idle=not self._busy)

    def note_report(self, report: StepReport) -> None:
        """A step is done, and this is what the workers tell of it; there is one report for every step."""
        self._pace.ended()
        for key, rank in report.evicted:
            self._held.get(key, set()).discard(rank)
        for key, rank in report.held:
            self._held.setdefault(key, set()).add(rank)
        for request_id, workers in report.loaded.items():
            if request_id in self._waiting:
                self._waiting[request_id].loaded += workers
        for request_id in report.failed & self._requests.keys():
            self._requests[request_id].given_up = True
        for request_id in report.deviations.keys() & self._requests.keys():
            self._requests[request_id].deviation = report.deviations[request_id]

    def note_received(self, finished: Iterable[str]) -> None:
        """The orders of these requests are fulfilled, or given up."""
        for request_id in finished:
            self._forget_progress(request_id)

    def finished(self, request_id: str) -> dict[str, Any] | None:
        """The request has ended, or was aborted; what its output tells of linking."""
        if request_id in self._waiting:
            self._dropped.append(request_id)
            self._forget_progress(request_id)
        request = self._requests.pop(request_id, None)
        return None if request is None else {PARAM: request.outcome.model_dump(exclude_none=True)}

    def _has_to_wait(self, request: _Request, progress: Progress) -> bool:
        """Orders are fulfilled within the request's own first step only if that takes not much longer by it."""
        order = request.order
        if order.captures or order.compares or not all(map(self._is_held, order.keys)):
            return True
        budget = self._budget()
        if not self._busy:
            return not progress.fits(budget)
        cost = progress.cost(budget) + request.own + self._linked_at_once
        return cost > budget.tokens or not progress.fits(budget)

    def _is_held(self, key: str) -> bool:
        return len(self._held.get(key, ())) >= self._limits.workers

    def _budget(self) -> Budget:
        """For the next step, going by whether it holds anything else."""
        if self._busy:
            return Budget(self._pace.tokens, self._limits.runs, self._pace.placed_per_computed)
        return Budget(self._limits.step_tokens, self._limits.runs, PLACED_PER_COMPUTED)

    def _progress(self, request_id: str, begin: int) -> Progress:
        order = self._requests[request_id].order
        share = min(1.0, (COMPARED_LAYER + 1) / self._limits.layers) if order.compares else 1.0
        return Progress(request_id, order, begin=begin, share=share)

    def _next_slices(self, budget: Budget) -> list[Slice]:
        """In the order in which the requests came. One that time is being saved for lets none overtake it."""
        slices = []
        for request in self._waiting.values():
            if budget.spent:
                break
            progress = request.progress
            if progress is None or request.ordered or request.loaded < self._limits.workers:
                continue
            if self._busy and progress.fits(budget):
                if not self._pace.may_end(progress.cost(budget) + request.own):
                    break
                self._pace.spend(request.own)
            part = progress.take(budget)
            slices.append(part)
            request.ordered = part.is_last
        return slices

    def _forget_progress(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            request.progress, request.loaded, request.ordered = None, 0, False
