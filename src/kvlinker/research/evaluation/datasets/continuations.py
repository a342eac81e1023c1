"""Text to be scored: ``passages`` and the ``continuation`` behind them, to the letter.

Optional are ``id`` and ``task``.
"""

from __future__ import annotations

from kvlinker.research.evaluation.datasets.base import Format, Source, one_by_one
from kvlinker.research.evaluation.datasets.records import Record, text_field, texts_field
from kvlinker.research.evaluation.examples import Continuation


def _parse(record: Record, source: Source) -> Continuation:
    return Continuation(
        id=str(record.fields.get("id", record.number)),
        dataset=source.name,
        task=str(record.fields.get("task", source.name)),
        passages=source.splitter.passages(texts_field(record, "passages")),
        continuation=text_field(record, "continuation"),
    )


CONTINUATIONS = Format("continuations", ("passages", "continuation"), one_by_one(_parse))
