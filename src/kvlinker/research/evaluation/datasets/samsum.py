"""Few-shot summaries (SAMSum, Gliwa et al. 2019): ``question`` is a dialogue, ``answer`` its summary.

The first records are the examples to choose from, each a chunk that many prompts share; the others are asked.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice

from kvlinker.research.evaluation.datasets.base import Format, Source, one_by_one
from kvlinker.research.evaluation.datasets.records import BadRecordError, Record, text_field
from kvlinker.research.evaluation.examples import Example, Question, Skipped

POOL = 20
SHOTS = 6


def _read(records: Iterable[Record], source: Source) -> Iterator[Example | Skipped]:
    remaining = iter(records)
    pool = []
    for record in islice(remaining, POOL):
        try:
            pool.append(f"{_dialogue(record)}{text_field(record, 'answer').strip()}\n\n")
        except BadRecordError as error:
            yield Skipped(f"record {record.number}", str(error))

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

    yield from one_by_one(parse)(remaining, source)


def _dialogue(record: Record) -> str:
    lines = "\n".join(text_field(record, "question").split("\r\n"))
    return f"Dialogue:\n{lines}\nSummary: "


SAMSUM = Format("samsum", ("question", "answer"), _read)
