"""Key-value retrieval (Lost in the Middle, Liu et al. 2023): ``ordered_kv_records`` (pairs), ``key``, ``value``."""

from __future__ import annotations

from kvlinker.research.evaluation.datasets.base import Format, Source, one_by_one
from kvlinker.research.evaluation.datasets.records import BadRecordError, Record, field, text_field
from kvlinker.research.evaluation.examples import Question

PAIRS_PER_PASSAGE = 5


def _parse(record: Record, source: Source) -> Question:
    pairs = field(record, "ordered_kv_records")
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadRecordError("'ordered_kv_records' must be a list of pairs")
    lines = [f'"{key}": "{value}"\n' for key, value in pairs]
    passages = ["".join(lines[i : i + PAIRS_PER_PASSAGE]) for i in range(0, len(lines), PAIRS_PER_PASSAGE)]
    if not passages:
        raise BadRecordError("'ordered_kv_records' is empty")
    key = text_field(record, "key")
    return Question(
        id=str(record.number),
        dataset=source.name,
        task=source.name,
        passages=source.splitter.passages(passages),
        question=f'\nGive the value of this key of the JSON data above, and nothing else.\nKey: "{key}"\nValue:',
        answers=(text_field(record, "value"),),
        metric="exact_match",
        max_tokens=64,
        whole=True,
    )


KV_RETRIEVAL = Format("kv-retrieval", ("ordered_kv_records", "key", "value"), one_by_one(_parse))
