"""The connector's worker side: it loads chunks, carries out the transfers of each step, and reports
on them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.futures import completed
from kvlinker.engines.contract.finite import require_finite
from kvlinker.engines.contract.sensitivity import with_sensitivity
from kvlinker.store import ChunkKV
from kvlinker_vllm.adapter import BoundModel
from kvlinker_vllm.protocol.steps import (
    StartedTransfer,
    StepReport,
    StepTransfers,
    TransferSlice,
)
from kvlinker_vllm.protocol.transfer_plan import TransferPlan
from kvlinker_vllm.worker.layers import own_heads, trace_layers
from kvlinker_vllm.worker.observing import QuestionObservation
from kvlinker_vllm.worker.passes import Passes, TransferTask
from kvlinker_vllm.worker.recording import ChunkCapture, KVComparison
from kvlinker_vllm.worker.selftest import require_exact
from kvlinker_vllm.worker.worker_chunks import WorkerChunks

logger = logging.getLogger("kvlinker.vllm.worker.transfer_worker")

PATIENCE_SECONDS = 0.005
"""The seconds that a step in which nothing else happens waits for chunks that are being loaded."""


@dataclass(slots=True)
class WorkerResults:
    """The results that a worker has to report to vLLM since the last report."""

    finished: set[str] = field(default_factory=set)
    """The requests whose waiting has ended."""

    failed: set[str] = field(default_factory=set)
    """The requests whose linking failed."""

    invalid_blocks: set[int] = field(default_factory=set)
    """The blocks whose KV vLLM expected from a step that failed to provide it."""


class TransferWorker:
    """Carries out transfers in one of vLLM's workers, whose thread calls everything.

    A request that fails is reported, and vLLM computes it; with several workers, all of them give
    it up in the same step, since each waits for the others in every pass. Nothing raises, except,
    with several workers, errors within a pass of the model: the others wait already.
    """

    def __init__(
        self,
        bound: BoundModel,
        chunks: WorkerChunks,
        *,
        pass_tokens: int,
        pass_runs: int,
        with_scores: bool,
        native: bool,
    ) -> None:
        """``pass_tokens`` and ``pass_runs`` are the most that one pass of the model takes. With
        ``with_scores``, captured chunks get their scores; ``native`` says whether code may be
        compiled for CPUs.

        Raises UnsupportedModelError for a model that cannot be linked.
        """
        self._bound = bound
        self._layers = trace_layers(bound)
        chunks.keep_only(partial(own_heads, self._layers, bound.dtype))
        require_exact(bound, self._layers)
        self._passes = Passes(
            bound, self._layers, tokens=pass_tokens, runs=pass_runs, native=native
        )
        self._chunks = chunks
        self._with_scores = with_scores
        self._tasks: dict[str, TransferTask] = {}
        self._writing: dict[str, Future[bool]] = {}
        self._measured: dict[str, bytes] = {}
        self._results = WorkerResults()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-write")

    def step(self, transfers: StepTransfers) -> tuple[StepReport, WorkerResults]:
        """Carry out the transfers that the scheduler side planned for this step, and report on them
        to it, and to vLLM."""
        self._bound.hold_generators()
        try:
            self._step(transfers)
        except Exception:
            if not self._bound.is_alone:
                raise
            logger.exception("Linking failed; the requests under way are computed by vLLM alone.")
            for request_id in list(self._tasks):
                self._end(request_id, failed=True)
        newly = self._newly_loaded()
        came, evicted = self._chunks.take_changes()
        measured, self._measured = self._measured, {}
        results, self._results = self._results, WorkerResults()
        report = StepReport(
            loaded={task.started.request_id: 1 for task in newly},
            failed=frozenset(results.failed),
            held=frozenset((key, self._bound.rank) for key in came),
            evicted=frozenset((key, self._bound.rank) for key in evicted),
            measured=measured,
        )
        return report, results

    def _step(self, transfers: StepTransfers) -> None:
        for request_id in transfers.aborted:
            self._end(request_id)
        for started in transfers.started:
            self._tasks[started.request_id] = self._begin(started)
        if transfers.idle and not transfers.slices:
            self._wait_a_little()
        slices = [
            (self._tasks[part.request_id], part)
            for part in transfers.slices
            if part.request_id in self._tasks
        ]
        try:
            self._carry_out(slices)
        finally:  # before vLLM's own pass
            self._passes.settle()
        self._collect_written()

    def close(self) -> None:
        """Finish pending writes."""
        self._loader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _begin(self, started: StartedTransfer) -> TransferTask:
        try:
            return self._task(started)
        except Exception:
            logger.exception(
                "Request %s cannot be linked; vLLM computes it alone.", started.request_id
            )
            return TransferTask(started, completed(None), started.tokens, failed=True)

    def _task(self, started: StartedTransfer) -> TransferTask:
        plan, tokens = started.plan, started.tokens
        if not started.block_ids:
            raise KVLinkerError("There are no blocks left for the windows of its layers.")
        if plan.unrelated is not None:
            tokens = np.delete(tokens, slice(*plan.unrelated))
        with_scores = self._with_scores and plan.scored
        recorder = self._recorder(plan.alone or plan, tokens, with_scores=with_scores)
        resident = {key: kv for key in plan.keys if (kv := self._chunks.resident(key)) is not None}
        loaded: Future[dict[str, ChunkKV] | None] = (
            completed(resident)
            if len(resident) == len(plan.keys)
            else self._loader.submit(self._load, plan.keys)
        )
        return TransferTask(started, loaded, tokens, recorder)

    def _recorder(
        self, plan: TransferPlan, tokens: NDArray[np.int64], *, with_scores: bool
    ) -> ChunkCapture | KVComparison | QuestionObservation | None:
        if plan.measure == "deviation":
            return KVComparison(self._layers, plan.linked, self._bound)
        if plan.measure == "attention":
            return QuestionObservation(self._layers, plan.linked, self._bound)
        if not plan.captures:
            return None
        return ChunkCapture(
            plan.captures, tokens, self._layers, self._bound, with_scores=with_scores
        )

    def _begin_again(self, task: TransferTask) -> None:
        """Compute the task's prompt again from its beginning, with its unrelated text."""
        assert isinstance(task.recorder, ChunkCapture)
        task.tokens, task.alone = task.started.tokens, task.recorder
        task.recorder = self._recorder(task.started.plan, task.tokens, with_scores=False)

    def _load(self, keys: Sequence[str]) -> dict[str, ChunkKV] | None:
        """Load the chunks, in the loader's thread. All of them are read even if one is damaged, so
        that one request finds all that are."""
        kvs = {}
        for key in keys:
            try:
                kv = self._chunks.get(key)
            except ValueError as error:
                logger.error("Chunk %s does not fit the model: %s.", key, error)
                continue
            except Exception:
                logger.exception("Chunk %s could not be loaded.", key)
                continue
            if kv is None:
                logger.warning("Chunk %s is gone, or was damaged and has been removed.", key)
            else:
                kvs[key] = kv
        return kvs if len(kvs) == len(keys) else None

    def _wait_a_little(self) -> None:
        pending: list[Future[Any]] = [
            task.loaded for task in self._tasks.values() if not task.load_reported
        ]
        pending += self._writing.values()
        if pending:
            wait(pending, timeout=PATIENCE_SECONDS, return_when=FIRST_COMPLETED)

    def _newly_loaded(self) -> list[TransferTask]:
        """Return the tasks whose chunks have been loaded, or could not be, since the last call."""
        tasks = self._tasks.values()
        newly = [
            task
            for task in tasks
            if task.started.waits and not task.load_reported and task.loaded.done()
        ]
        for task in newly:
            task.load_reported = True
        return newly

    def _carry_out(self, slices: Sequence[tuple[TransferTask, TransferSlice]]) -> None:
        with self._fail_on_error(slices):
            for task, part in slices:
                if part.begins_again:
                    self._begin_again(task)
            self._passes.place(slices)
        failed = self._bound.any_worker([task.failed for task, _ in slices])
        for (task, _), gone in zip(slices, failed, strict=True):
            if gone:
                self._end(task.started.request_id, failed=True)
        rest = [each for each, gone in zip(slices, failed, strict=True) if not gone]
        with self._fail_on_error(rest) if self._bound.is_alone else nullcontext():
            self._passes.compute(rest)
        for task, part in rest:
            if part.is_last:
                self._complete(task)

    @contextmanager
    def _fail_on_error(
        self, slices: Sequence[tuple[TransferTask, TransferSlice]]
    ) -> Iterator[None]:
        """Mark the slices' tasks as failed if the block raises."""
        try:
            yield
        except Exception:
            logger.exception("Linking failed; its requests are computed by vLLM alone.")
            for task, _ in slices:
                task.failed = True

    def _complete(self, task: TransferTask) -> None:
        """End a task whose last slice is done."""
        request_id = task.started.request_id
        recorder = task.recorder
        if task.failed or recorder is None:
            self._end(request_id, failed=task.failed)
        elif isinstance(recorder, ChunkCapture):
            behind = None if task.alone is None else recorder.finish()[0]
            kvs = (task.alone or recorder).finish()
            if self._bound.is_first_rank:
                keys = [chunk.key for chunk in recorder.chunks]
                self._writing[request_id] = self._writer.submit(
                    self._write, keys, kvs, behind, keep=task.started.plan.scored
                )
            else:
                self._end(request_id)
        else:
            measured = recorder.finish()
            if self._bound.is_first_rank:
                self._measured[request_id] = measured
            self._end(request_id)

    def _write(
        self, keys: Sequence[str], kvs: Sequence[ChunkKV], behind: ChunkKV | None, *, keep: bool
    ) -> bool:
        """Store captured chunks, in the writer's thread, and measure the sensitivity of one that
        was captured ``behind`` another text, too. With ``keep`` they stay in memory, as those that
        requests ask for, and not those of a row, which the front end takes. Returns whether the
        disk took all. Raises KVLinkerError for numbers that are not finite."""
        for kv in kvs:
            require_finite(kv)
        if behind is not None:
            require_finite(behind)
            kvs = [with_sensitivity(kvs[0], behind)]
        taken = [self._chunks.put(key, kv, keep=keep) for key, kv in zip(keys, kvs, strict=True)]
        return all(taken)

    def _collect_written(self) -> None:
        for request_id, written in list(self._writing.items()):
            if written.done():
                del self._writing[request_id]
                error = written.exception()
                if error is not None:
                    logger.error("A chunk could not be written.", exc_info=error)
                self._end(request_id, failed=error is not None or not written.result())

    def _end(self, request_id: str, *, failed: bool = False) -> None:
        """End the work for a request. If it waits, report its end to vLLM, exactly once; if it does
        not, report which of its blocks are invalid."""
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        if failed:
            self._results.failed.add(request_id)
        if task.started.waits:
            self._results.finished.add(request_id)
        elif failed:
            (block_ids,) = task.started.block_ids  # with several groups, all requests wait
            size = self._bound.groups[0].block_size
            first = 0 if task.started.plan.second_pass else task.started.begin // size
            self._results.invalid_blocks.update(block_ids[first:])
