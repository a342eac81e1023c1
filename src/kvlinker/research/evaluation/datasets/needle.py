"""Needle in a haystack (Kamradt 2023): one sentence inside essays, at every depth and for several lengths.

The data set is a folder of ``.txt`` files, the haystack. EPIC measures the answer by F1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from kvlinker.errors import InvalidRequestError
from kvlinker.research.evaluation.datasets.base import Source
from kvlinker.research.evaluation.datasets.prompts import short_question
from kvlinker.research.evaluation.examples import Question

NEEDLE = "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day."
QUESTION = "What is the best thing to do in San Francisco?"
ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"

LENGTHS = (500, 1000, 2000, 4000, 8000, 16000)
"""Tokens of the haystack; about, since passages are not cut for it."""

DEPTHS = tuple(range(0, 101, 10))
"""Where the needle is, in percent of the haystack."""

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


def needle_examples(folder: Path, source: Source) -> Iterator[Question]:
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
    """The needle between two sentences, as near as can be to ``depth`` (0 to 1) of the text."""
    starts = list(accumulate(map(len, passages), initial=0))
    gaps = [(0, 0)] + [(i, end.end()) for i, passage in enumerate(passages) for end in _SENTENCE_END.finditer(passage)]
    index, place = min(gaps, key=lambda gap: abs(starts[gap[0]] + gap[1] - depth * starts[-1]))
    passage = passages[index]
    return (*passages[:index], f"{passage[:place]}{NEEDLE} {passage[place:]}", *passages[index + 1 :])
