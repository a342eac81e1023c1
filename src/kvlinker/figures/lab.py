"""What figures measure with: a model that answers, shapes that are timed, and quality runs of policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from kvlinker.bench.quality import QualityOptions, main_rows, run_quality
from kvlinker.bench.report import Report, Row
from kvlinker.bench.subject import Subject, make_subject
from kvlinker.config import Settings
from kvlinker.evaluation.contexts import ContextSplitter
from kvlinker.evaluation.datasets import load_dataset
from kvlinker.evaluation.examples import Example, Question
from kvlinker.evaluation.inspection import EngineInspector, Inspector
from kvlinker.llm import LLM

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Bench:
    """A running model with the means to look into it, and examples to ask it."""

    llm: LLM
    inspector: Inspector
    examples: tuple[Example, ...]

    @property
    def questions(self) -> tuple[Question, ...]:
        """The examples that are questions."""
        return tuple(example for example in self.examples if isinstance(example, Question))


@dataclass(frozen=True)
class Lab:
    """Where figures are measured.

    ``settings`` name the model that answers. ``limit``: examples of each measurement, in place of the figure's own
    number. ``shape``: random weights to time, in place of the figure's own choice. ``command`` reproduces the run.
    """

    settings: Settings
    command: str
    limit: int | None = None
    shape: str | None = None
    progress: Progress = field(default=lambda _text, _done, _total: None)

    @cached_property
    def reader(self) -> Subject:
        """The model that answers questions."""
        return make_subject(self.settings, shape=None, command=self.command)

    def timed(self, shape: str) -> Subject:
        """Random weights of a shape large enough for times to mean something."""
        return make_subject(self.settings, shape=self.shape or shape, command=self.command)

    def quality(
        self, what: str, policies: Sequence[str], *, limit: int, settings: dict[str, Any] | None = None, **options: Any
    ) -> list[Row]:
        """Rows of ``kvlinker bench quality`` by the metric that each task is usually measured by.

        ``what`` is said while it runs. ``settings`` replace some of the lab's, ``options`` are fields of
        ``QualityOptions``. Asks ``limit`` examples of each data set unless the lab has its own limit.
        """
        chosen = QualityOptions(policies=tuple(policies), limit=self.limit or limit, **options)
        changed = self.settings.model_copy(update=settings or {})
        measured = run_quality(
            self.reader, changed, chosen, progress=lambda done, total: self.progress(what, done, total)
        )
        return main_rows(measured.report.rows)

    @contextmanager
    def bench(self, *, limit: int, dataset: str = "reader", tasks: Sequence[str] = ()) -> Iterator[Bench]:
        """The reader with ``limit`` examples of a data set, of the named tasks only if there are any."""
        with self.reader.llm(disk_space=0, generation_context=self.settings.generation_context) as llm:
            splitter = ContextSplitter(llm.builder.encoder)
            examples = load_dataset(dataset, splitter, limit=self.limit or limit, tasks=tasks).examples
            yield Bench(llm, EngineInspector(llm, self.reader.loaded), examples)

    def report(self, rows: list[Row], model: str | None = None) -> Report:
        """The rows with the machine they were measured on. ``model``: what was measured, if not the reader."""
        report = self.reader.report(rows)
        return report if model is None else replace(report, settings={**report.settings, "model": model})
