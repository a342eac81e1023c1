"""Makes questions that ask for one thing in a long context: key-value retrieval, and the needle in
a haystack.

Key-value retrieval is Lost in the Middle's (Liu et al. 2023), with ``ordered_kv_records`` (pairs),
``key`` and ``value``. The needle (Kamradt 2023) is one sentence inside essays, at every depth and
for several lengths; its data set is a folder of ``.txt`` files, the haystack. EPIC measures its
answer by F1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.evaluation.datasets.formats import (
    Format,
    Source,
    one_by_one,
    register,
    short_question,
)
from kvlinker.quality.evaluation.datasets.records import BadRecordError, Record, field, text_field
from kvlinker.quality.evaluation.examples import Question

PAIRS_PER_PASSAGE = 5
"""The keys with their values in one passage. Chosen by hand."""

NEEDLE = (
    "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny"
    " day."
)
QUESTION = "What is the best thing to do in San Francisco?"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"

LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)
"""About how many tokens the haystack has; passages are not cut for it."""

DEPTHS = tuple(range(0, 101, 10))
"""Places of the needle, in percent of the haystack."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def _key_and_value(record: Record, source: Source) -> Question:
    pairs = field(record, "ordered_kv_records")
    if not isinstance(pairs, list) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise BadRecordError("'ordered_kv_records' must be a list of pairs")
    lines = [f'"{key}": "{value}"\n' for key, value in pairs]
    passages = [
        "".join(lines[i : i + PAIRS_PER_PASSAGE]) for i in range(0, len(lines), PAIRS_PER_PASSAGE)
    ]
    if not passages:
        raise BadRecordError("'ordered_kv_records' is empty")
    key = text_field(record, "key")
    return Question(
        id=str(record.number),
        dataset=source.name,
        task=source.name,
        passages=source.splitter.passages(passages),
        question=(
            "\nGive the value of this key of the JSON data above, and nothing else.\nKey:"
            f' "{key}"\nValue:'
        ),
        answers=(text_field(record, "value"),),
        metric="exact_match",
        max_tokens=64,
        whole=True,
    )


def needle_examples(folder: Path, source: Source) -> Iterator[Question]:
    """Yield questions of all lengths at one depth, then at the next. Lengths that the essays do not
    fill are left out.

    Raises InvalidRequestError for a folder without texts, or with one that cannot be read.
    """
    files = sorted(folder.glob("*.txt"))
    try:
        haystack = "\n\n".join(
            file.read_text(encoding="utf-8", errors="replace").strip() for file in files
        )
    except OSError as error:
        raise InvalidRequestError(f"Cannot read a text: {error}", param="dataset") from error
    if not haystack.strip():
        raise InvalidRequestError(
            f"{folder} has no .txt files with text: a haystack needs some.", param="dataset"
        )
    pieces = source.splitter.pieces(haystack)
    ends = list(accumulate(piece.tokens for piece in pieces))
    for depth in DEPTHS:
        for length in LENGTHS:
            count = next((number for number, end in enumerate(ends, 1) if end >= length), None)
            if count is None:
                continue
            passages = [piece.text for piece in pieces[:count]]
            yield Question(
                id=f"{length}-{depth}",
                dataset=source.name,
                task=f"needle-{length}",
                passages=_with_needle(passages, depth / 100),
                question="\n\n" + short_question(QUESTION),
                answers=(ANSWER,),
                whole=True,
            )


def _with_needle(passages: list[str], depth: float) -> tuple[str, ...]:
    """Put the needle between two sentences of the passages, as near as can be to ``depth`` (0 to 1)
    of the text."""
    starts = list(accumulate(map(len, passages), initial=0))
    gaps = [(0, 0)] + [
        (i, end.end())
        for i, passage in enumerate(passages)
        for end in _SENTENCE_END.finditer(passage)
    ]
    index, place = min(gaps, key=lambda gap: abs(starts[gap[0]] + gap[1] - depth * starts[-1]))
    passage = passages[index]
    return (
        *passages[:index],
        f"{passage[:place]}{NEEDLE} {passage[place:]}",
        *passages[index + 1 :],
    )


register(Format("kv-retrieval", ("ordered_kv_records", "key", "value"), one_by_one(_key_and_value)))
