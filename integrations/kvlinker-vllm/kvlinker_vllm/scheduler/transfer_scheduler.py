"""The connector's scheduler side decides which requests are linked, and the part of each engine
step."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvlinker.base.errors import InvalidRequestError
from kvlinker_vllm.protocol.signature import PlanSigner
from kvlinker_vllm.protocol.steps import (
    StartedTransfer,
    StepBudget,
    StepReport,
    StepTransfers,
    TransferProgress,
    TransferSlice,
)
from kvlinker_vllm.protocol.transfer_plan import (
    COMPARED_LAYER,
    PARAM,
    TransferOutcome,
    TransferPlan,
)
from kvlinker_vllm.protocol.worker_memory import KNOWN, WorkerMemory
from kvlinker_vllm.scheduler.transfer_throttle import (
    PLACED_PER_COMPUTED,
    SLOWDOWN,
    StepWork,
    TransferThrottle,
)
from kvlinker_vllm.scheduler.window_blocks import BlockIds, Room, WindowBlocks

logger = logging.getLogger("kvlinker.vllm.scheduler.transfer_scheduler")

FORGET = None, False
"""True if vLLM is to forget its KV of a request, since a first pass placed it."""

LATER = None, True
"""The answer that other requests must free blocks first."""

MOST_SECONDS_WITHOUT_BLOCKS = 30.0
"""The seconds from its arrival for which a request waits for others' blocks."""


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The limits of how much a step links."""

    slice_tokens: int
    """The most tokens that a step links while other requests are being computed."""

    step_tokens: int
    """The most tokens that a step links if there are no others."""

    runs: int
    """The most sequences that attention takes at once."""

    layers: int
    """The number of the model's layers; transfers that measure deviation compute the first ones
    only."""

    workers: int = 1
    """The number of workers that report."""

    slowdown: float = SLOWDOWN
    """The factor by which others wait longer for a token while one request is linked, on average
    (see ``TransferThrottle``)."""


@dataclass(slots=True, eq=False)
class _TransferRequest:
    """The state of a request with a transfer plan, from its arrival to its end."""

    plan: TransferPlan

    own: int
    """The tokens that vLLM computes itself in the request's first step."""

    admitted: float
    """The time of arrival, in seconds of ``time.perf_counter``."""

    known: object = None
    """Its front end's state of workers' memory."""

    queued: float | None = None
    """The seconds from arrival until vLLM began with it; None before that."""

    found: int = 0
    """The tokens that vLLM had in its prefix cache when it began with the request."""

    computed_in_full: bool = False
    """True if a chunk vanished or linking failed, so that vLLM computes the request."""

    waits: bool = True
    """True if it is linked before its own first step, False if within it, by the last decision."""

    measured: bytes | None = None
    """The measurement of its plan, once it is done."""

    progress: TransferProgress | None = None
    """The rest of the plan while vLLM holds the request back."""

    loaded: int = 0
    """The number of workers that have all of its chunks in memory while vLLM holds it back."""

    ending: bool = False
    """True while its last slice is under way."""


class TransferScheduler:
    """Carries out the transfer plans of vLLM's requests. All methods are called by one thread,
    vLLM's engine core."""

    def __init__(
        self, *, limits: StepLimits, signer: PlanSigner, is_stored: Callable[[str], bool]
    ) -> None:
        """``is_stored`` returns whether a chunk's KV is in the store's folder."""
        self._signer = signer
        self._limits = limits
        self._is_stored = is_stored
        self._requests: dict[str, _TransferRequest] = {}
        self._waiting: dict[
            str, _TransferRequest
        ] = {}  # those that vLLM holds back, in the order in which they came
        self._started: list[StartedTransfer] = []  # for the next step
        self._aborted: list[str] = []
        self._memory = WorkerMemory(limits.workers)
        self._busy = False
        self._linked_at_once = 0.0  # tokens, within requests' own first steps, of the next step
        self._throttle = TransferThrottle(limits.slice_tokens, slowdown=limits.slowdown)
        self._windows: WindowBlocks | None = None
        self._target_told = False

    def lend(self, blocks: WindowBlocks) -> None:
        """Let requests borrow ``blocks`` where layers have windows. Call it before the first
        request."""
        self._windows = blocks if blocks.are_needed else None

    def admit(
        self,
        request_id: str,
        params: Mapping[str, Any] | None,
        tokens: Sequence[int],
        *,
        salt: str | None,
    ) -> None:
        """Accept a request for a prompt of these tokens.

        vLLM computes the request alone if its transfer plan is not valid, or if the request has no
        salt: prompts of the same plain tokens would find its KV. It computes the request in full if
        a chunk of the plan is gone. The workers notice a chunk that goes later.
        """
        try:
            plan = self._signer.verify(params, tokens)
        except InvalidRequestError as error:
            logger.warning("Request %s is not linked: %s", request_id, error)
            return
        if plan is None:
            return
        if not salt:
            logger.warning(
                "Request %s is not linked: it has no cache_salt, which every linked one needs.",
                request_id,
            )
            return
        request = self._requests[request_id] = _TransferRequest(
            plan, len(tokens) - plan.linked, time.perf_counter(), (params or {}).get(KNOWN)
        )
        missing = [key for key in plan.keys if not self._is_stored(key)]
        if missing:
            logger.warning(
                "Request %s is computed in full: chunk %s is gone.", request_id, missing[0]
            )
            request.computed_in_full = True

    def match(self, request_id: str, local: int, tokens: int) -> tuple[int | None, bool]:
        """Return how many of a request's ``tokens`` linking provides beyond the ``local`` ones that
        vLLM has, and whether the request has to wait for it; ``FORGET`` or ``LATER`` where vLLM has
        to ask again.

        vLLM asks in every step in which the request waits, so that nothing slow happens here: no
        file is looked at.
        """
        request = self._requests.get(request_id)
        if request is None:
            return 0, False
        plan = request.plan
        if request.queued is None and not plan.second_pass:
            request.found = local
        if plan.second_pass and local and (request.computed_in_full or self._windows is not None):
            return FORGET
        if request.computed_in_full or request.measured is not None or local >= plan.linked:
            return 0, False
        room = self._windows.room_for(plan, local, tokens) if self._windows else Room.NOW
        if room is not Room.NOW:
            waited = time.perf_counter() - request.admitted
            if room is Room.LATER and waited < MOST_SECONDS_WITHOUT_BLOCKS:
                return LATER
            logger.warning("Request %s is computed in full: no blocks are left.", request_id)
            request.computed_in_full = True
            return 0, False
        request.own = tokens - plan.linked
        request.waits = self._has_to_wait(request, self._progress(request_id, local))
        return plan.linked - local, request.waits

    def begin_transfer(
        self,
        request_id: str,
        tokens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        *,
        external: int,
        vllms: Any = None,
    ) -> None:
        """Begin to link the request in its blocks, by group: vLLM expects ``external`` tokens, as
        ``match`` returned. ``vllms`` is vLLM's own request."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.queued is None:
            request.queued = time.perf_counter() - request.admitted
        if not external:
            return
        begin = request.plan.linked - external
        blocks: BlockIds = tuple(map(tuple, block_ids))
        if self._windows is not None:
            complete = self._windows.complete(request_id, request.plan, begin, blocks, vllms)
            blocks = complete or ()
        self._started.append(
            StartedTransfer(
                request_id=request_id,
                plan=request.plan,
                tokens=np.asarray(tokens[: request.plan.linked], dtype=np.int64),
                block_ids=blocks,
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
            if self._busy:
                self._throttle.spend(request.own)

    def placed_tokens(self, request_id: str, *, external: int) -> int:
        """Return how many of the ``external`` tokens that a request was allocated come from chunks.
        The others are computed, for it or for a chunk."""
        request = self._requests.get(request_id)
        if request is None:
            return 0
        begin = request.plan.linked - external
        return external - sum(max(0, last - max(first, begin)) for first, last in request.plan.runs)

    def plan_step(self, *, scheduled_tokens: int, prefilled_tokens: int) -> StepTransfers:
        """Plan the workers' tasks in a step that also computes ``scheduled_tokens`` tokens,
        ``prefilled_tokens`` of them of prompts."""
        started = tuple(self._started)
        at_once = StepBudget.unlimited()
        slices = [
            self._progress(each.request_id, each.begin).take(at_once)
            for each in started
            if not each.waits
        ]
        self._busy = scheduled_tokens > 0
        self._linked_at_once = 0.0
        self._throttle.expect(len(self._waiting))
        if not self._waiting:
            self._throttle.idle()
        budget = self._budget()
        slices += self._next_slices(budget)
        if self._busy and slices:
            self._tell_target()
        placed, computed = at_once.placed + budget.placed, at_once.computed + budget.computed
        self._throttle.note_plan(StepWork(placed, computed, prefilled_tokens, self._busy))
        aborted = tuple(self._aborted)
        self._started.clear()
        self._aborted.clear()
        return StepTransfers(started, tuple(slices), aborted, idle=not self._busy)

    def note_report(self, report: StepReport) -> None:
        """Note the workers' report of a step that is done; there is one report for every step."""
        self._throttle.note_end()
        self._memory.note(report.held, report.evicted)
        for request_id, workers in report.loaded.items():
            if request_id in self._waiting:
                self._waiting[request_id].loaded += workers
        for request_id in report.failed & self._requests.keys():
            self._requests[request_id].computed_in_full = True
        for request_id in report.measured.keys() & self._requests.keys():
            self._requests[request_id].measured = report.measured[request_id]

    def note_received(self, finished: Iterable[str]) -> None:
        """Note that the transfers of these requests have ended or failed."""
        for request_id in finished:
            self._forget_progress(request_id)
            if self._windows is not None:
                self._windows.release(request_id)

    def finish(self, request_id: str) -> dict[str, Any] | None:
        """Forget a request that has ended, or was aborted. Returns the outcome of linking for its
        output."""
        if request_id in self._waiting:
            self._aborted.append(request_id)
            self._forget_progress(request_id)
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        outcome = TransferOutcome(
            linked=not request.computed_in_full,
            queued=request.queued or 0.0,
            found=request.found,
            measured=request.measured,
            memory=self._memory.changes(request.known),
        )
        return {PARAM: outcome.model_dump(exclude_none=True)}

    def _has_to_wait(self, request: _TransferRequest, progress: TransferProgress) -> bool:
        """Return whether linking within the request's own first step would make that much
        longer."""
        plan = request.plan
        if self._windows is not None:
            return True  # vLLM takes no word of a failure from within a step
        if plan.captures or plan.measure or not all(map(self._memory.holds, plan.keys)):
            return True
        budget = self._budget()
        if not self._busy:
            return not progress.fits(budget)
        if any(each.loaded >= self._limits.workers for each in self._waiting.values()):
            return True  # those that came before are next
        cost = progress.cost(budget) + request.own + self._linked_at_once
        return cost > budget.tokens or not progress.fits(budget)

    def _budget(self) -> StepBudget:
        """Return the budget of the next step, which depends on whether the step computes anything
        else."""
        if self._busy:
            return StepBudget(
                self._throttle.tokens, self._limits.runs, self._throttle.placed_per_computed
            )
        return StepBudget(self._limits.step_tokens, self._limits.runs, PLACED_PER_COMPUTED)

    def _progress(self, request_id: str, begin: int) -> TransferProgress:
        plan = self._requests[request_id].plan
        compares = plan.measure == "deviation"
        share = min(1.0, (COMPARED_LAYER + 1) / self._limits.layers) if compares else 1.0
        return TransferProgress(request_id, plan, begin=begin, share=share)

    def _next_slices(self, budget: StepBudget) -> list[TransferSlice]:
        """Take slices of waiting requests, in order of arrival. A request that time is being saved
        for is not overtaken."""
        slices = []
        for request in self._waiting.values():
            if budget.spent:
                break
            progress = request.progress
            if progress is None or request.ending or request.loaded < self._limits.workers:
                continue
            if self._busy and progress.fits(budget):
                if not self._throttle.may_end(progress.cost(budget) + request.own):
                    break
                self._throttle.spend(request.own)
            part = progress.take(budget)
            slices.append(part)
            request.ending = part.is_last
        return slices

    def _tell_target(self) -> None:
        """Log the throttle's state, as soon as it is known."""
        target = self._throttle.target_seconds
        if target is not None and not self._target_told:
            self._target_told = True
            logger.info(
                "While a prompt is linked, others get a token every %.1f ms on average (slowdown"
                " %.2f), and %.1f ms later for each more that waits to be linked.",
                1e3 * target,
                self._limits.slowdown,
                1e3 * target * (1 - 1 / self._limits.slowdown),
            )

    def _forget_progress(self, request_id: str) -> None:
        request = self._waiting.pop(request_id, None)
        if request is not None:
            request.progress, request.loaded, request.ending = None, 0, False
