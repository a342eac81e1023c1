"""The connector's worker side: it loads chunks, places them, computes runs over them, and stores what is captured."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from kvlinker.store import ChunkKV
from kvlinker.vllm.adapter import BoundModel
from kvlinker.vllm.protocol.messages import Begun, StepOrders, StepReport
from kvlinker.vllm.protocol.slices import Slice
from kvlinker.vllm.worker.anatomy import check_chunk, trace_layers
from kvlinker.vllm.worker.capturing import Capture
from kvlinker.vllm.worker.comparing import Comparison
from kvlinker.vllm.worker.passes import Passes
from kvlinker.vllm.worker.task import Task
from kvlinker.vllm.worker.worker_chunks import WorkerChunks

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 0.005
"""How long a step in which nothing else happens waits for chunks that are being loaded."""


@dataclass(slots=True)
class Results:
    """Since the last time: requests that wait no longer, requests that are not linked after all, and blocks whose KV
    vLLM counted on in vain within a step."""

    finished: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    invalid_blocks: set[int] = field(default_factory=set)


class LinkingWorker:
    """One thread, vLLM's worker, calls everything. What goes wrong with a request is reported, and vLLM computes it;
    with several workers, all of them give it up in the same step, for each waits for the others in every pass. Nothing
    raises but, with several workers, what happens within a pass of the model: the others wait already.
    """

    def __init__(
        self, bound: BoundModel, chunks: WorkerChunks, *, pass_tokens: int, pass_runs: int, with_scores: bool
    ) -> None:
        """``pass_tokens`` and ``pass_runs``: the most that one pass of the model takes. ``with_scores``: collect
        captured chunks' attention scores.

        Raises UnsupportedModelError for a model that cannot be linked.
        """
        self._bound = bound
        self._layers = trace_layers(bound)
        self._passes = Passes(bound, self._layers, tokens=pass_tokens, runs=pass_runs)
        self._chunks = chunks
        self._with_scores = with_scores
        self._tasks: dict[str, Task] = {}
        self._writing: dict[str, Future[bool]] = {}
        self._deviations: dict[str, bytes] = {}
        self._results = Results()
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-load")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-write")

    def step(self, orders: StepOrders) -> StepReport:
        """Do what the scheduler side ordered for this step."""
        try:
            self._step(orders)
        except Exception:
            if not self._bound.is_alone:
                raise
            logger.exception("Linking failed; the requests under way are computed by vLLM alone.")
            for request_id in list(self._tasks):
                self._end(request_id, failed=True)
        evicted = self._chunks.take_evicted()
        newly = self._newly_loaded()
        keys = {key for task in newly for key in task.begun.order.keys if self._chunks.holds(key)}
        deviations, self._deviations = self._deviations, {}
        return StepReport(
            loaded={task.begun.request_id: 1 for task in newly},
            failed=frozenset(self._results.failed),
            held=frozenset((key, self._bound.rank) for key in keys),
            evicted=frozenset((key, self._bound.rank) for key in evicted),
            deviations=deviations,
        )

    def _step(self, orders: StepOrders) -> None:
        for request_id in orders.dropped:
            self._end(request_id)
        for begun in orders.begun:
            self._tasks[begun.request_id] = self._begin(begun)
        if orders.idle and not orders.slices:
            self._wait_a_little()
        self._fulfil([(self._tasks[part.request_id], part) for part in orders.slices if part.request_id in self._tasks])
        self._collect_written()

    def take_results(self) -> Results:
        results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Finish writing."""
        self._loader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _begin(self, begun: Begun) -> Task:
        try:
            return self._task(begun)
        except Exception:
            logger.exception("Request %s cannot be linked; vLLM computes it alone.", begun.request_id)
            loaded: Future[dict[str, ChunkKV] | None] = Future()
            loaded.set_result(None)
            return Task(begun, loaded, failed=True)

    def _task(self, begun: Begun) -> Task:
        captures = tuple(
            Capture(chunk, begun.tokens, self._layers, self._bound.dtype, with_scores=self._with_scores)
            for chunk in begun.order.captures
        )
        comparison = Comparison(self._layers, begun.order.linked) if begun.order.compares else None
        at_hand = {key: kv for key in begun.order.keys if (kv := self._chunks.at_hand(key)) is not None}
        if len(at_hand) == len(begun.order.keys) and all(map(self._fits, at_hand, at_hand.values())):
            loaded: Future[dict[str, ChunkKV] | None] = Future()
            loaded.set_result(at_hand)
        else:
            loaded = self._loader.submit(self._load, begun.order.keys)
        return Task(begun, loaded, captures, comparison)

    def _load(self, keys: Sequence[str]) -> dict[str, ChunkKV] | None:
        """Runs in the loader's thread. Every chunk is looked at, so that one request finds all that are damaged."""
        kvs = {}
        for key in keys:
            try:
                kv = self._chunks.get(key)
            except Exception:
                logger.exception("Chunk %s could not be loaded.", key)
                continue
            if kv is None:
                logger.warning("Chunk %s is gone, or was damaged and has been removed.", key)
            elif self._fits(key, kv):
                kvs[key] = kv
        return kvs if len(kvs) == len(keys) else None

    def _fits(self, key: str, kv: ChunkKV) -> bool:
        reason = check_chunk(self._layers, [tuple(layer.key.shape) for layer in kv.layers])
        if reason is None and kv.layers[0].key.dtype != self._bound.dtype:
            reason = f"it is {kv.layers[0].key.dtype}, the model {self._bound.dtype}"
        if reason is not None:
            logger.error("Chunk %s does not fit the model: %s.", key, reason)
        return reason is None

    def _wait_a_little(self) -> None:
        pending: list[Future[Any]] = [task.loaded for task in self._tasks.values() if not task.told_loaded]
        pending += self._writing.values()
        if pending:
            wait(pending, timeout=PATIENCE_SECONDS, return_when=FIRST_COMPLETED)

    def _newly_loaded(self) -> list[Task]:
        """Tasks whose chunks have come since the last time, or have not come."""
        tasks = self._tasks.values()
        newly = [task for task in tasks if task.begun.waits and not task.told_loaded and task.loaded.done()]
        for task in newly:
            task.told_loaded = True
        return newly

    def _fulfil(self, slices: Sequence[tuple[Task, Slice]]) -> None:
        with self._giving_up(slices):
            self._passes.place(slices)
        failed = self._bound.any_worker([task.failed for task, _ in slices])
        for (task, _), gone in zip(slices, failed, strict=True):
            if gone:
                self._end(task.begun.request_id, failed=True)
        rest = [each for each, gone in zip(slices, failed, strict=True) if not gone]
        with self._giving_up(rest) if self._bound.is_alone else nullcontext():
            self._passes.compute(rest)
        for task, part in rest:
            if part.is_last:
                self._complete(task)

    @contextmanager
    def _giving_up(self, slices: Sequence[tuple[Task, Slice]]) -> Iterator[None]:
        """The slices' tasks have failed if anything raises meanwhile."""
        try:
            yield
        except Exception:
            logger.exception("Linking failed; its requests are computed by vLLM alone.")
            for task, _ in slices:
                task.failed = True

    def _complete(self, task: Task) -> None:
        """The last slice is done."""
        request_id = task.begun.request_id
        if task.failed:
            self._end(request_id, failed=True)
        elif task.comparison is not None:
            deviation = task.comparison.finish(self._bound)
            if self._bound.is_first_rank:
                self._deviations[request_id] = deviation.to_bytes()
            self._end(request_id)
        elif not task.captures:
            self._end(request_id)
        else:
            kvs = [(capture.chunk.key, capture.finish(self._bound)) for capture in task.captures]
            if self._bound.is_first_rank:
                self._writing[request_id] = self._writer.submit(self._write, kvs)
            else:
                self._end(request_id)

    def _write(self, kvs: Sequence[tuple[str, ChunkKV]]) -> bool:
        """Runs in the writer's thread."""
        stored = [self._chunks.put(key, kv) for key, kv in kvs]
        return all(stored)

    def _collect_written(self) -> None:
        for request_id, written in list(self._writing.items()):
            if written.done():
                del self._writing[request_id]
                error = written.exception()
                if error is not None:
                    logger.error("A chunk could not be written.", exc_info=error)
                self._end(request_id)

    def _end(self, request_id: str, *, failed: bool = False) -> None:
        """No more is done for the request; where it waits, vLLM is told so, exactly once. Where it does not, vLLM is
        told which of its blocks are not what they should be."""
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        if failed:
            self._results.failed.add(request_id)
        if task.begun.waits:
            self._results.finished.add(request_id)
        elif failed:
            first = task.begun.begin // self._bound.block_size
            self._results.invalid_blocks.update(task.begun.block_ids[first:])
