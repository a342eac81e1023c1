"""Holds what figures measure with: a model that answers, shapes that are timed, and quality runs of
policies."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any

from kvlinker.llm import LLM, Message
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.measurement import in_turn, seconds_of
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.bench.quality import (
    CONTEXT_SETTINGS,
    Quality,
    QualityOptions,
    main_rows,
    run_quality,
)
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.examples import Question
from kvlinker.quality.progress import Progress, silent
from kvlinker.settings import Settings
from kvlinker.store import ContextCache
from kvlinker_lab.inspection import EngineInspector

SEVERAL_PASSAGES = ("anaphora", "bridge", "comparison")
"""The reader's tasks whose answers need several passages together, as those of multi-hop data sets
do."""

LATENCY_ROUNDS = 3
"""The measurements of each time to the first token, of which the median counts."""


@dataclass(frozen=True)
class OpenReader:
    """Holds the reader while it runs, with the means to look into it, and examples to ask it."""

    llm: LLM
    inspector: EngineInspector
    examples: tuple[Question, ...]

    def messages(self, example: Question) -> list[Message]:
        """Cache the example's passages, and return a message of them and its question."""
        cached = (self.llm.generate_context_cache([passage]) for passage in example.passages)
        return _message(chain.from_iterable(cached), example)


@dataclass(frozen=True)
class Lab:
    """The settings and the models that a figure is measured with."""

    settings: Settings
    """The settings that name the model that answers, and say how its chunks are made."""
    command: str
    """The command line that reproduces the run."""
    limit: int | None = None
    """Examples of each measurement, in place of the figure's own number."""
    shape: str | None = None
    """Random weights to time, in place of the figure's own choice."""
    progress: Progress = silent

    @cached_property
    def reader(self) -> MeasuredModel:
        """The model that answers questions."""
        return Setup(self.settings, command=self.command).subject()

    def random_model(self, shape: str) -> MeasuredModel:
        """Make random weights of a shape that is large enough for times to mean something."""
        return Setup(self.settings, self.shape or shape, self.command).subject()

    def quality(
        self,
        what: str,
        policies: Sequence[str],
        *,
        limit: int,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[Row]:
        """Return the rows of ``kvlinker bench quality`` by the metric that each task is usually
        measured by.

        See ``examine``.
        """
        return main_rows(
            self.examine(what, policies, limit=limit, settings=settings, **options).report.rows
        )

    def examine(
        self,
        what: str,
        policies: Sequence[str],
        *,
        limit: int,
        settings: dict[str, Any] | None = None,
        **options: Any,
    ) -> Quality:
        """Measure what ``kvlinker bench quality`` does, and return every example's results.

        ``what`` is shown while it runs. ``settings`` replace some of the lab's, ``options`` are
        fields of ``QualityOptions``. ``limit`` examples of each data set are asked unless the lab
        has its own limit.
        """
        chosen = QualityOptions(policies=tuple(policies), limit=self.limit or limit, **options)
        changed = self.settings.model_copy(update=settings or {})

        def report_progress(_what: str, done: int = 0, total: int | None = None, /) -> None:
            self.progress(what, done, total)

        return run_quality(self.reader, changed, chosen, progress=report_progress)

    def first_token_times(
        self, what: str, questions: Sequence[Mapping[str, Question]], policies: Sequence[str]
    ) -> list[dict[tuple[str, str], float]]:
        """Return seconds to the first token by (form, policy) for each question, given in its forms
        by name.

        ``what`` is shown while it runs.
        """
        times = []
        with self._run_reader() as llm:
            for done, forms in enumerate(questions):
                self.progress(what, done, len(questions))
                times.append(first_token_times(llm, forms, policies))
        return times

    @contextmanager
    def open_reader(
        self,
        *,
        limit: int,
        dataset: str = "reader",
        tasks: Sequence[str] = (),
        fits: Callable[[Question], bool] = lambda _: True,
    ) -> Iterator[OpenReader]:
        """Run the reader, with the first ``limit`` questions that ``fits`` accepts, of the named
        ``tasks`` if any."""
        with self._run_reader() as llm:
            loaded = load_dataset(dataset, ContextSplitter(llm.builder.encoder), tasks=tasks)
            questions = (one for one in loaded.examples if isinstance(one, Question) and fits(one))
            yield OpenReader(
                llm,
                EngineInspector(llm, self.reader.loaded),
                tuple(islice(questions, self.limit or limit)),
            )

    def report(self, rows: list[Row], shape: str | None = None) -> Report:
        """Make a report of the rows. ``shape`` is the figure's own, if it asked no reader."""
        report = self.reader.report(rows)
        return (
            report
            if shape is None
            else replace(report, settings={**report.settings, "model": self.shape or shape})
        )

    @contextmanager
    def _run_reader(self) -> Iterator[LLM]:
        """Run the model that answers, with its chunks made as ``settings`` say."""
        made = {name: getattr(self.settings, name) for name in CONTEXT_SETTINGS}
        with self.reader.llm(disk_space=0, **made) as llm:
            yield llm


def first_token_times(
    llm: LLM,
    forms: Mapping[str, Question],
    policies: Sequence[str],
    *,
    repeat: int = LATENCY_ROUNDS,
) -> dict[tuple[str, str], float]:
    """Return the median seconds from asking to the first token, by (form, policy), with all chunks
    cached.

    ``forms`` has one question as it is asked, by name, such as one for each way of cutting its
    context. The time to build the prompt counts. Everything takes its turn. Raises what
    ``LLM.chat_completion`` does.
    """

    def make_request(prompt: Sequence[Message], policy: str) -> Callable[[], object]:
        return lambda: llm.chat_completion(prompt, policy=policy, max_tokens=1, temperature=0)

    asked = {
        form: _message(llm.generate_context_cache(question.passages), question)
        for form, question in forms.items()
    }
    taken = in_turn(
        {
            (form, policy): seconds_of(make_request(prompt, policy))
            for form, prompt in asked.items()
            for policy in policies
        },
        repeat=repeat,
    )
    return {key: statistics.median(seconds) for key, seconds in taken.items()}


def _message(caches: Iterable[ContextCache], question: Question) -> list[Message]:
    """Return one user message of context caches with the question after them."""
    return [{"role": "user", "content": [*caches, question.question]}]
