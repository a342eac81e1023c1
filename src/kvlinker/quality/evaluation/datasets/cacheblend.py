"""Reads the files of CacheBlend's evaluation: multi-hop questions such as MuSiQue's, and SAMSum's
few-shot summaries.

Multi-hop questions have ``ctxs`` (each with ``title`` and ``text``), ``question`` and ``answers``.
SAMSum (Gliwa et al. 2019) has ``question``, a dialogue with a line ``Name: words`` for every turn,
and ``answer``, its summary; the first records are the examples to choose from, each a chunk that
many prompts share, and the others are asked.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice

from kvlinker.base.errors import InvalidRequestError
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
from kvlinker.quality.evaluation.examples import Example, Question, Skipped

POOL = 20
"""SAMSum's records that are examples to choose from."""
SHOTS = 6
"""Examples in each of SAMSum's prompts."""

_TURN = re.compile(r"^[^\s:][^:\n]{0,40}:(\s|$)", re.MULTILINE)
_FEWEST_TURNS = 2
"""The fewest lines that make a dialogue."""


def _multi_hop(record: Record, source: Source) -> Question:
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


def _summaries(records: Iterable[Record], source: Source) -> Iterator[Example | Skipped]:
    remaining = iter(records)
    pool = []
    for record in islice(remaining, POOL):
        try:
            pool.append(f"{_dialogue(record)}{text_field(record, 'answer').strip()}\n\n")
        except BadRecordError as error:
            yield Skipped(f"record {record.number}", str(error))
    if not pool:
        raise InvalidRequestError(
            f"{source.name}: none of the first {POOL} records can be an example of a summary.",
            param="dataset",
        )

    def parse(record: Record, source: Source) -> Question:
        shots = random.Random(record.number).sample(pool, min(SHOTS, len(pool)))
        return Question(
            id=str(record.number),
            dataset=source.name,
            task=source.name,
            passages=source.splitter.passages(shots),
            question=f"Summarise the next dialogue in the same way.\n\n{_dialogue(record)}",
            answers=(text_field(record, "answer"),),
            metric="rouge_l",
            max_tokens=128,
        )

    asked = 0
    for example in one_by_one(parse)(remaining, source):
        asked += 1
        yield example
    if not asked:
        yield Skipped(
            "all records",
            f"the first {POOL} are examples of summaries, and there are no more to ask",
        )


def _dialogue(record: Record) -> str:
    lines = "\n".join(text_field(record, "question").split("\r\n"))
    if (objection := _no_dialogue(record)) is not None:
        raise BadRecordError(objection)
    return f"Dialogue:\n{lines}\nSummary: "


def _no_dialogue(record: Record) -> str | None:
    question = record.fields["question"]
    turns = len(_TURN.findall(question.replace("\r\n", "\n"))) if isinstance(question, str) else 0
    return None if turns >= _FEWEST_TURNS else "'question' is no dialogue of lines 'Name: words'"


register(Format("multi-hop", ("ctxs", "question", "answers"), one_by_one(_multi_hop)))
register(Format("samsum", ("question", "answer"), _summaries, objection=_no_dialogue))
