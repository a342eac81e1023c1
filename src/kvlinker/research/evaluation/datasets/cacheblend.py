"""The files of CacheBlend's evaluation, such as MuSiQue: ``ctxs`` (``title``, ``text``), ``question``, ``answers``."""

from __future__ import annotations

from kvlinker.research.evaluation.datasets.base import Format, Source, one_by_one
from kvlinker.research.evaluation.datasets.prompts import short_question
from kvlinker.research.evaluation.datasets.records import BadRecordError, Record, field, text_field, texts_field
from kvlinker.research.evaluation.examples import Question


def _parse(record: Record, source: Source) -> Question:
    contexts = field(record, "ctxs")
    if not isinstance(contexts, list) or not all(isinstance(context, dict) for context in contexts):
        raise BadRecordError("'ctxs' must be a list of objects with 'title' and 'text'")
    passages = [_passage(Record(record.number, context)) for context in contexts]
    if not passages:
        raise BadRecordError("'ctxs' is empty")
    return Question(
        id=str(record.number),
        dataset=source.name,
        task=source.name,
        passages=source.splitter.passages(passages),
        question=short_question(text_field(record, "question")),
        answers=texts_field(record, "answers"),
    )


def _passage(context: Record) -> str:
    title = str(context.fields.get("title") or "").strip()
    text = text_field(context, "text").strip()
    return f"{title}\n\n{text}\n\n" if title else f"{text}\n\n"


CACHEBLEND = Format("cacheblend", ("ctxs", "question", "answers"), one_by_one(_parse))
