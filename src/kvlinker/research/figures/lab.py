"""What figures measure with: a model that answers, shapes that are timed, and quality runs of policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from kvlinker.config import Settings
from kvlinker.llm import LLM, Message
from kvlinker.research.bench.quality import Quality, QualityOptions, main_rows, run_quality
from kvlinker.research.bench.report import Report, Row
from kvlinker.research.bench.subject import Subject, make_subject
from kvlinker.research.evaluation.answers import ask
from kvlinker.research.evaluation.contexts import ContextSplitter
from kvlinker.research.evaluation.datasets import load_dataset
from kvlinker.research.evaluation.examples import Question
from kvlinker.research.evaluation.inspection import EngineInspector
from kvlinker.research.evaluation.latency import first_token_times

SEVERAL_PASSAGES = ("anaphora", "bridge", "comparison")
"""The reader's tasks whose answers need several passages together, as those of multi-hop data sets do."""

Progress = Callable[[str, int, int], None]
"""Takes what is being done, how much of it is done, and how much there is."""


@dataclass(frozen=True)
class Bench:
    """A running model with the means to look into it, and examples to ask it."""

    llm: LLM
    inspector: EngineInspector
    examples: tuple[Question, ...]

    def messages(self, example: Question) -> list[Message]:
        """The example's passages as context caches, and its question."""
        return ask(self.llm, example.passages, example.question)


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
        """Rows of ``kvlinker bench quality`` by the metric that each task is usually measured by; see ``examine``."""
        return main_rows(self.examine(what, policies, limit=limit, settings=settings, **options).report.rows)

    def examine(
        self, what: str, policies: Sequence[str], *, limit: int, settings: dict[str, Any] | None = None, **options: Any
    ) -> Quality:
        """What ``kvlinker bench quality`` measures, with every example's results.

        ``what`` is said while it runs. ``settings`` replace some of the lab's, ``options`` are fields of
        ``QualityOptions``. Asks ``limit`` examples of each data set unless the lab has its own limit.
        """
        chosen = QualityOptions(policies=tuple(policies), limit=self.limit or limit, **options)
        changed = self.settings.model_copy(update=settings or {})
        return run_quality(self.reader, changed, chosen, progress=lambda done, total: self.progress(what, done, total))

    def first_token_times(
        self, what: str, questions: Sequence[Mapping[str, Question]], policies: Sequence[str]
    ) -> list[dict[tuple[str, str], float]]:
        """Seconds to the first token by (form, policy) for each question, given in its forms by name.

        See ``kvlinker.research.evaluation.latency``. ``what`` is said while it runs.
        """
        times = []
        with self._reading() as llm:
            for done, forms in enumerate(questions):
                self.progress(what, done, len(questions))
                times.append(first_token_times(llm, forms, policies))
        return times

    @contextmanager
    def bench(
        self,
        *,
        limit: int,
        dataset: str = "reader",
        tasks: Sequence[str] = (),
        fits: Callable[[Question], bool] = lambda _: True,
    ) -> Iterator[Bench]:
        """The reader with the first ``limit`` questions that ``fits`` accepts, of the named tasks only if any are."""
        with self._reading() as llm:
            loaded = load_dataset(dataset, ContextSplitter(llm.builder.encoder), tasks=tasks)
            questions = (one for one in loaded.examples if isinstance(one, Question) and fits(one))
            yield Bench(llm, EngineInspector(llm, self.reader.loaded), tuple(islice(questions, self.limit or limit)))

    def report(self, rows: list[Row], shape: str | None = None) -> Report:
        """The rows with the machine they were measured on. ``shape``: the figure's own, if it asked no reader."""
        report = self.reader.report(rows)
        return report if shape is None else replace(report, settings={**report.settings, "model": self.shape or shape})

    @contextmanager
    def _reading(self) -> Iterator[LLM]:
        """The model that answers, with its chunks made as ``settings`` say."""
        with self.reader.llm(
            disk_space=0,
            generation_context=self.settings.generation_context,
            system_prompt=self.settings.system_prompt,
            chat_template=self.settings.chat_template,
            max_model_len=self.settings.max_model_len,
        ) as llm:
            yield llm
