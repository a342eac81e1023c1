"""Needle in a haystack (Kamradt 2023): one sentence inside essays, at every depth and for several lengths.

The data set is a folder of ``.txt`` files, the haystack. EPIC measures the answer by F1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from kvlinker.errors import InvalidRequestError
from kvlinker.evaluation.datasets.base import Source
from kvlinker.evaluation.datasets.prompts import short_question
from kvlinker.evaluation.examples import Example

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"

LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)
"""Tokens of the haystack; about, since passages are not cut for it."""

DEPTHS = tuple(range(0, 101, 10))
"""Where the needle is, in percent of the haystack."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def needle_examples(folder: Path, source: Source) -> Iterator[Example]:
    """All lengths at one depth, then at the next. Lengths that the essays do not fill are left out.

    Raises InvalidRequestError for a folder without texts.
    """
    files = sorted(folder.glob("*.txt"))
    haystack = "\n\n".join(file.read_text(encoding="utf-8", errors="replace").strip() for file in files)
    if not haystack.strip():
        raise InvalidRequestError(f"{folder} has no .txt files with text: a haystack needs some.", param="dataset")
    pieces = source.splitter.pieces(haystack)
    ends = list(accumulate(piece.tokens for piece in pieces))
    for depth in DEPTHS:
        for length in LENGTHS:
            count = next((number for number, end in enumerate(ends, 1) if end >= length), None)
            if count is None:
                continue
            passages = [piece.text for piece in pieces[:count]]
            yield Example(
                id=f"{length}-{depth}",
                dataset=source.name,
                task=f"needle-{length}",
                passages=_with_needle(passages, depth / 100),
                question="\n\n" + short_question(QUESTION),
                answers=(ANSWER,),
            )


def _with_needle(passages: list[str], depth: float) -> tuple[str, ...]:
    """The needle between two sentences of the passage that lies at ``depth`` (0 to 1) of the text."""
    target = depth * sum(map(len, passages))
    starts = list(accumulate(map(len, passages), initial=0))
    index = min(sum(start <= target for start in starts) - 1, len(passages) - 1)
    passage = passages[index]
    breaks = [0, *(found.end() for found in _SENTENCE_END.finditer(passage)), len(passage)]
    place = min(breaks, key=lambda end: abs(starts[index] + end - target))
    before, after = passage[:place], passage[place:]
    gap = "" if not before or before[-1].isspace() else " "
    return (*passages[:index], f"{before}{gap}{NEEDLE} {after}", *passages[index + 1 :])
