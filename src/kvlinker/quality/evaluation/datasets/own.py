"""Reads kvlinker's own formats: questions about passages, and text that goes on after passages.

Texts are taken to the letter: a passage carries its own separator, such as an empty line at its
end. Optional are ``id`` and ``task``, and for questions ``metric``, ``max_tokens``, ``first_line``,
``choices`` and ``wrong``, as in ``Question``.
"""

from __future__ import annotations

from kvlinker.quality.evaluation.datasets.formats import Format, Source, one_by_one, register
from kvlinker.quality.evaluation.datasets.records import (
    BadRecordError,
    Record,
    text_field,
    texts_field,
)
from kvlinker.quality.evaluation.examples import Continuation, Question
from kvlinker.quality.evaluation.metrics import METRICS


def _question(record: Record, source: Source) -> Question:
    fields = record.fields
    first_line = bool(fields.get("first_line", True))
    choices = _choices(record, first_line=first_line)
    metric = fields.get("metric", "exact_match" if choices else "f1")
    if not isinstance(metric, str) or metric not in METRICS:
        raise BadRecordError(f"'metric' is {metric!r}, but must be one of {', '.join(METRICS)}")
    max_tokens = fields.get("max_tokens", 32)
    if type(max_tokens) is not int or max_tokens < 1:
        raise BadRecordError(
            f"'max_tokens' is {max_tokens!r}, but must be a whole number of at least 1"
        )
    return Question(
        id=str(fields.get("id", record.number)),
        dataset=source.name,
        task=str(fields.get("task", source.name)),
        passages=source.splitter.passages(texts_field(record, "passages")),
        question=text_field(record, "question"),
        answers=texts_field(record, "answers"),
        metric=metric,
        max_tokens=max_tokens,
        first_line=first_line,
        choices=choices,
        wrong=texts_field(record, "wrong") if "wrong" in fields else (),
    )


def _choices(record: Record, *, first_line: bool) -> tuple[str, ...]:
    if "choices" not in record.fields:
        return ()
    choices = texts_field(record, "choices")
    if len(set(choices)) < 2 or not set(choices) & set(texts_field(record, "answers")):
        rule = "but must be two texts or more, one of 'answers' among them"
        raise BadRecordError(f"'choices' is {list(choices)}, {rule}")
    if first_line and any("\n" in choice.strip() for choice in choices):
        raise BadRecordError(
            f"'choices' is {list(choices)}, but an answer ends with its first line ('first_line')"
        )
    return choices


def _continuation(record: Record, source: Source) -> Continuation:
    return Continuation(
        id=str(record.fields.get("id", record.number)),
        dataset=source.name,
        task=str(record.fields.get("task", source.name)),
        passages=source.splitter.passages(texts_field(record, "passages")),
        continuation=text_field(record, "continuation"),
    )


register(Format("passages", ("passages", "question", "answers"), one_by_one(_question)))
register(Format("continuations", ("passages", "continuation"), one_by_one(_continuation)))
