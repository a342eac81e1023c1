"""What a step does of tasks' orders: KV is placed, and runs go through the model, in passes that are not too large."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from kvlinker.vllm.adapter import BoundModel, VirtualSequences
from kvlinker.vllm.protocol.slices import Slice
from kvlinker.vllm.worker.anatomy import LinkedLayer
from kvlinker.vllm.worker.capturing import CapturedRows, capturing
from kvlinker.vllm.worker.comparing import FIRST_LAYERS, ComparedRows, comparing
from kvlinker.vllm.worker.placing import place
from kvlinker.vllm.worker.task import Task


@dataclass(frozen=True, slots=True)
class _Run:
    """Positions [begin, end) of a task to be computed, in a pass whose rows before ``first`` are other runs'."""

    task: Task
    begin: int
    end: int
    first: int = 0


class Passes:
    """Fulfils slices of orders."""

    def __init__(self, bound: BoundModel, layers: Sequence[LinkedLayer], *, tokens: int, runs: int) -> None:
        """``tokens`` and ``runs``: the most that one pass takes."""
        self._bound = bound
        self._layers = layers
        self._tokens = tokens
        self._runs = runs

    def place(self, slices: Sequence[tuple[Task, Slice]]) -> None:
        """What is placed, before anything is computed."""
        self._place(self._layers, [each for each in slices if each[0].comparison is None])
        self._place(self._layers[FIRST_LAYERS], [each for each in slices if each[0].comparison is not None])

    def compute(self, slices: Sequence[tuple[Task, Slice]]) -> None:
        """The runs. Raises what the model does."""
        runs = [_Run(task, *run) for task, each in slices for run in each.runs]
        for group in self._grouped(runs, lambda task: not task.captures and task.comparison is None):
            self._bound.forward(self._sequences(group))
        for group in self._grouped(runs, lambda task: bool(task.captures)):
            with capturing(self._bound, self._layers, _captured_rows(group)):
                self._bound.forward(self._sequences(group), eager=True)
        for group in self._grouped(runs, lambda task: task.comparison is not None):
            with comparing(self._bound, self._layers, list(self._compared_rows(group))):
                self._bound.forward(self._sequences(group), eager=True)

    def _place(self, layers: Sequence[LinkedLayer], slices: Iterable[tuple[Task, Slice]]) -> None:
        place(layers, [part for task, each in slices for part in task.parts(self._bound, each.parts)])

    def _grouped(self, runs: Iterable[_Run], wanted: Callable[[Task], bool]) -> Iterator[list[_Run]]:
        """Runs of the tasks that are wanted, as much at once as a pass takes."""
        group: list[_Run] = []
        tokens = 0
        for run in self._cut(run for run in runs if wanted(run.task)):
            length = run.end - run.begin
            if group and (tokens + length > self._tokens or len(group) == self._runs):
                yield group
                group, tokens = [], 0
            group.append(_Run(run.task, run.begin, run.end, first=tokens))
            tokens += length
        if group:
            yield group

    def _cut(self, runs: Iterable[_Run]) -> Iterator[_Run]:
        """The same, none longer than a pass."""
        for run in runs:
            for begin in range(run.begin, run.end, self._tokens):
                yield _Run(run.task, begin, min(begin + self._tokens, run.end))

    def _sequences(self, runs: Sequence[_Run]) -> VirtualSequences:
        device = self._bound.device
        positions = [torch.arange(run.begin, run.end, device=device) for run in runs]
        slots = [self._bound.slots(run.task.begun.block_ids, own) for run, own in zip(runs, positions, strict=True)]
        tokens = [torch.from_numpy(run.task.begun.tokens[run.begin : run.end]) for run in runs]
        return VirtualSequences(
            tokens=torch.cat(tokens).to(device),
            positions=torch.cat(positions),
            slots=torch.cat(slots),
            query_lengths=[run.end - run.begin for run in runs],
            lengths=[run.end for run in runs],
            block_ids=[run.task.begun.block_ids for run in runs],
        )

    def _compared_rows(self, runs: Iterable[_Run]) -> Iterator[ComparedRows]:
        for run in runs:
            assert run.task.comparison is not None
            parts = tuple(run.task.parts_within(self._bound, run.begin, run.end))
            yield ComparedRows(run.first, run.begin, parts, run.task.comparison)


def _captured_rows(runs: Iterable[_Run]) -> list[CapturedRows]:
    return [CapturedRows(run.first, run.end - run.begin, run.begin, run.task.captures) for run in runs]
