"""The connector's worker side: it loads chunks, places them, computes runs over them, and stores what is captured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from kvlinker.store import ChunkKV
from kvlinker.vllm.adapter import BoundModel
from kvlinker.vllm.anatomy import check_chunk, trace_layers
from kvlinker.vllm.capturing import Capture
from kvlinker.vllm.comparing import Comparison
from kvlinker.vllm.metadata import Begun, StepOrders, StepReport
from kvlinker.vllm.passes import Passes
from kvlinker.vllm.slices import Slice
from kvlinker.vllm.task import Task
from kvlinker.vllm.worker_chunks import WorkerChunks

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
    """One thread, vLLM's worker, calls everything. Nothing raises: what goes wrong with a request is reported."""

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
            logger.exception("Linking failed; the requests under way are computed by vLLM alone.")
            for request_id in list(self._tasks):
                self._tasks[request_id].failed = True
                self._end(request_id, failed=True)
        deviations, self._deviations = self._deviations, {}
        return StepReport(
            self._newly_loaded(), frozenset(self._results.failed), self._chunks.take_evicted(), deviations
        )

    def _step(self, orders: StepOrders) -> None:
        for request_id in orders.dropped:
            self._end(request_id)
        for begun in orders.begun:
            self._tasks[begun.request_id] = self._begin(begun)
        if orders.idle and not orders.slices:
            self._wait_a_little()
        slices = [(self._tasks[part.request_id], part) for part in orders.slices if part.request_id in self._tasks]
        self._fulfil(slices)
        for task, part in slices:
            if part.is_last:
                self._complete(task)
        self._collect_written()

    def take_results(self) -> Results:
        results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Finish writing."""
        self._loader.shutdown(cancel_futures=True)
        self._writer.shutdown()

    def _begin(self, begun: Begun) -> Task:
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
        """Runs in the loader's thread."""
        kvs = {}
        for key in keys:
            try:
                kv = self._chunks.get(key)
            except Exception:
                logger.exception("Chunk %s could not be loaded.", key)
                return None
            if kv is None or not self._fits(key, kv):
                return None
            kvs[key] = kv
        return kvs

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

    def _newly_loaded(self) -> dict[str, int]:
        loaded = {}
        for request_id, task in self._tasks.items():
            if task.begun.waits and not task.told_loaded and task.loaded.done():
                task.told_loaded = True
                loaded[request_id] = 1
        return loaded

    def _fulfil(self, slices: Sequence[tuple[Task, Slice]]) -> None:
        try:
            self._passes.fulfil(slices)
        except Exception:
            logger.exception("Linking failed; its requests are computed by vLLM alone.")
            for task, _ in slices:
                task.failed = True

    def _complete(self, task: Task) -> None:
        """The last slice is done."""
        request_id = task.begun.request_id
        if not task.begun.waits:
            if task.failed:
                self._results.failed.add(request_id)
                first = task.begun.begin // self._bound.block_size
                self._results.invalid_blocks.update(task.begun.block_ids[first:])
            del self._tasks[request_id]
        elif task.comparison is not None:
            deviation = task.comparison.finish(self._bound)
            if self._bound.is_first_rank and not task.failed:
                self._deviations[request_id] = deviation.to_bytes()
            self._end(request_id, failed=task.failed)
        elif not task.captures or task.failed:
            self._end(request_id, failed=task.failed)
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
        """No more is done for the request; where it waits, vLLM is told so, exactly once."""
        task = self._tasks.pop(request_id, None)
        if task is not None and task.begun.waits:
            self._results.finished.add(request_id)
            if failed:
                self._results.failed.add(request_id)
