"""Reads any task of LongBench (Bai et al. 2023): ``input``, ``context``, ``answers``, and
``dataset``, the task."""

from __future__ import annotations

from typing import NamedTuple

from kvlinker.quality.evaluation.datasets.formats import (
    Format,
    Source,
    one_by_one,
    register,
    short_question,
)
from kvlinker.quality.evaluation.datasets.records import (
    BadRecordError,
    Record,
    field,
    text_field,
    texts_field,
)
from kvlinker.quality.evaluation.examples import Question


class Task(NamedTuple):
    """The question, the metric and the limit of a task."""

    metric: str
    max_tokens: int
    question: str | None = None
    """The prompt after the context, ``{input}`` being the record's own; None for a question with a
    short answer."""
    first_line: bool = True


_SUMMARY = "Write a one-page summary of the text above.\n\nSummary:"
_QUERY = (
    "Answer the query based on the text above in one or more sentences.\n\nQuery: {input}\nAnswer:"
)

QUESTION = Task("f1", 32)
TASKS: dict[str, Task] = {
    "narrativeqa": Task("f1", 128),
    "qasper": Task("f1", 128),
    "multifieldqa_en": Task("f1", 64),
    "hotpotqa": QUESTION,
    "2wikimqa": QUESTION,
    "musique": QUESTION,
    "triviaqa": Task("f1", 32, "{input}"),
    "trec": Task("exact_match", 64, "{input}"),
    "samsum": Task("rouge_l", 128, "{input}"),
    "gov_report": Task("rouge_l", 512, _SUMMARY, first_line=False),
    "multi_news": Task("rouge_l", 512, _SUMMARY, first_line=False),
    "qmsum": Task("rouge_l", 512, _QUERY, first_line=False),
    "passage_count": Task("exact_match", 32),
    "passage_retrieval_en": Task("exact_match", 32),
}
"""Tasks by name, with LongBench's lengths and metrics, as far as kvlinker has them. Others are
asked as QUESTION."""


def _parse(record: Record, source: Source) -> Question:
    name = str(record.fields.get("dataset") or source.name).removesuffix("_e")
    task = TASKS.get(name, QUESTION)
    asked = field(record, "input")
    if not isinstance(asked, str):
        raise BadRecordError(f"'input' is {type(asked).__name__}, but must be text")
    if task.question is None:
        question = short_question(text_field(record, "input"))
    else:
        question = task.question.format(input=asked.strip())
    return Question(
        id=str(record.fields.get("_id", record.number)),
        dataset=source.name,
        task=name,
        passages=source.splitter.cut(text_field(record, "context").rstrip() + "\n\n"),
        question=question,
        answers=texts_field(record, "answers"),
        metric=task.metric,
        max_tokens=task.max_tokens,
        first_line=task.first_line,
    )


register(Format("longbench", ("input", "context", "answers"), one_by_one(_parse)))
