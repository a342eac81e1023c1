"""Measures recognition of passages that a framework joined into one text, and the cost of the
seams."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from kvlinker.base.errors import ContextLengthError, InvalidRequestError
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.quality.bench.harness.benchmark import ChunkTokens, Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import load_dataset
from kvlinker.quality.evaluation.examples import REFERENCE, Question
from kvlinker.quality.evaluation.metrics import METRICS, best_score
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker.quality.progress import Progress, silent
from kvlinker.service.audit.comparison import agree, kl_divergence
from kvlinker_lab.joining import (
    JoinedPrompt,
    Recognised,
    Template,
    find_template,
    recognise,
)

if TYPE_CHECKING:
    from kvlinker.llm import LLM
    from kvlinker.service.implicit.caches import Recognizer

COLUMNS = (
    "dataset",
    "template",
    "n",
    "second_sight",
    "known",
    "whole",
    "outside",
    "answered",
    "tokens",
    "metric",
    "joined",
    "split",
    "vs_joined",
    "agreement",
    "kl",
)
MOST_KNOWN = 100_000
"""The most passages that the store knows, more than any data set has."""

LIFE_SECONDS = 24 * 3600.0
"""The time to live of a known passage: a day, longer than any run."""


@benchmark("recognition")
def recognition(
    setup: Setup,
    *,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Questions about passages, as bench quality takes them: reader (the default), a"
                " file, or a folder of "
                "texts; may be repeated."
            ),
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "How passages are joined: plain (the default), langchain or llama-index (if"
                " installed), or a text "
                "with {context} and {question}; may be repeated."
            ),
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most questions of each data set.")] = 50,
    chunk_tokens: ChunkTokens = 512,
) -> Report:
    """Measure which joined passages implicit=auto recognises, and how far tokens that are cut at
    the seams of marked passages change answers.

    Both answers are computed in full, so that the tokens at the seams are the only difference.
    """
    subject = setup.subject(limit=limit)
    templates = [find_template(name) for name in dict.fromkeys(template or ("plain",))]
    return run_recognition(
        subject,
        tuple(dict.fromkeys(dataset or ("reader",))),
        templates,
        limit=limit,
        chunk_tokens=chunk_tokens,
        progress=setup.progress,
    )


def run_recognition(
    subject: MeasuredModel,
    datasets: Sequence[str],
    templates: Sequence[Template],
    *,
    limit: int,
    chunk_tokens: int,
    progress: Progress = silent,
) -> Report:
    """Measure every data set in every template. Raises InvalidRequestError for data that cannot be
    read or asked."""
    rows: list[Row] = []
    for name in datasets:
        for template in templates:
            with subject.llm(disk_space=0, implicit_caches=MOST_KNOWN) as llm:
                splitter = ContextSplitter(llm.builder.encoder, max_tokens=chunk_tokens)
                found = load_dataset(name, splitter, limit=limit)
                questions = [example for example in found.examples if isinstance(example, Question)]
                if not questions:
                    raise InvalidRequestError(
                        f"{found.name} has no questions to ask.", param="dataset"
                    )
                measured = _measure(llm, questions, template, progress)
                rows.append({"dataset": found.name, "template": template.name, **measured})
    return replace(subject.report(rows), columns=COLUMNS)


@dataclass(frozen=True, slots=True)
class _Answered:
    """One question, answered from the joined text and from the one that is split at its
    passages."""

    joined: float
    split: float
    tokens: float
    """The tokens of the split text over those of the joined one."""

    agreement: bool
    kl: float


def _measure(
    llm: LLM, questions: Sequence[Question], template: Template, progress: Progress
) -> Row:
    from kvlinker.service.implicit.caches import Recognizer

    recognizer = Recognizer(
        llm.catalog, llm.builder.encoder, llm.events, fingerprint=llm.engine.fingerprint
    )
    seconds: list[float] = []
    others = [*questions[1:], questions[0]]
    again = [
        _second_sight(recognizer, question, other.question, template, seconds)
        for question, other in zip(questions, others, strict=True)
    ]
    known: list[Recognised] = []
    answers: list[_Answered] = []
    for number, question in enumerate(questions, 1):
        progress(f"{question.dataset}, {template.name}", number, len(questions))
        joined = template.join(question.passages, question.question)
        _enter(llm, question.passages)
        known.append(recognise(recognizer, joined, tenant=DEFAULT_TENANT))
        with suppress(ContextLengthError):
            answers.append(_answer(llm, question, joined))
    passages = sum(len(question.passages) for question in questions)
    row: Row = {
        "n": len(questions),
        "second_sight": _share(again),
        "known": _share(known),
        "whole": sum(each.whole for each in again) / passages,
        "outside": (
            sum(each.outside for each in again)
            / max(1, sum(each.inside + each.outside for each in again))
        ),
        "ms_per_10k_characters": 1e3 * statistics.median(seconds),
        "answered": len(answers),
        "metric": questions[0].metric,
    }
    return {**row, **_compare(answers)}


def _compare(answers: Sequence[_Answered]) -> Row:
    """Compare answers to split texts with those to joined ones; all is None where none fitted into
    the window."""
    names = (
        "tokens",
        "joined",
        "split",
        "vs_joined",
        "vs_joined_low",
        "vs_joined_high",
        "agreement",
        "kl",
    )
    if not answers:
        return dict.fromkeys(names)
    differences = [answer.split - answer.joined for answer in answers]
    figures = (
        fmean(answer.tokens for answer in answers),
        fmean(answer.joined for answer in answers),
        fmean(answer.split for answer in answers),
        fmean(differences),
        *mean_interval(differences),
        fmean(answer.agreement for answer in answers),
        fmean(answer.kl for answer in answers),
    )
    return dict(zip(names, figures, strict=True))


def _second_sight(
    recognizer: Recognizer,
    question: Question,
    before: str,
    template: Template,
    seconds: list[float],
) -> Recognised:
    """Return the recognition of passages that came in another order with the question ``before``,
    and the seconds for 10,000 characters."""
    first = template.join(question.passages, before)
    second = template.join(question.passages[::-1], question.question)
    recognise(recognizer, first, tenant="second sight")
    begun = time.thread_time()
    found = recognise(recognizer, second, tenant="second sight")
    seconds.append((time.thread_time() - begun) / len(second.text) * 10_000)
    return found


def _answer(llm: LLM, question: Question, joined: JoinedPrompt) -> _Answered:
    from kvlinker.quality.evaluation.examiner import QuestionTrial

    messages = [{"role": "user", "content": joined.text}]
    whole = llm.read_chat(messages, implicit="off", policy=REFERENCE).prompt
    marked = [{"role": "user", "content": _mark(joined)}]
    split = llm.read_chat(marked, implicit="marked", policy="naive", keeps=False).prompt
    trials = (QuestionTrial.of(question, llm, prompt) for prompt in (whole, split))
    answers = [trial.run(REFERENCE) for trial in trials]
    first_tokens = [answer.next_tokens[0] for answer in answers]
    scores = [
        best_score(METRICS[question.metric], answer.text, question.answers) for answer in answers
    ]
    return _Answered(
        joined=scores[0],
        split=scores[1],
        tokens=len(split) / len(whole),
        agreement=agree(*first_tokens),
        kl=kl_divergence(*first_tokens),
    )


def _mark(joined: JoinedPrompt) -> list[str | dict[str, object]]:
    """Return the joined text as content parts, with its passages marked."""
    parts: list[str | dict[str, object]] = []
    done = 0
    for begin, end in joined.passages:
        passage = joined.text[begin:end]
        parts.append(joined.text[done:begin])
        parts.append({"type": "text", "text": passage, "cache_control": {"type": "ephemeral"}})
        done = end
    return [*parts, joined.text[done:]]


def _enter(llm: LLM, passages: Sequence[str]) -> None:
    """Enter the passages as known chunks, without computing any KV."""
    for passage in passages:
        chunk = llm.builder.encode_chunk(passage.strip())
        llm.caches.creation.enter_implicit({chunk: LIFE_SECONDS}, owner=DEFAULT_TENANT, kept=())


def _share(found: Sequence[Recognised]) -> float:
    return sum(each.inside for each in found) / max(1, sum(each.passages for each in found))
