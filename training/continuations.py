"""Prose to be scored behind chunks of the prose before it: records of ``research.evaluation.datasets.continuations``.

Paragraphs follow each other as they stand in their source, with an empty line between. Texts are cut in front of words,
wherever they are long enough, so that chunks begin and end anywhere, as windows over documents do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

PASSAGES = 6
PASSAGE_CHARACTERS = 335
"""About 96 of the reader's tokens."""
CONTINUATION_CHARACTERS = 223
"""About 64."""


def continuations(paragraphs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """As many records as the paragraphs give, one behind the other; what is left at the end is dropped."""
    words = re.findall(r"\s*\S+", "\n\n".join(paragraphs))
    lengths = (*[PASSAGE_CHARACTERS] * PASSAGES, CONTINUATION_CHARACTERS)
    begin = 0
    for number in range(len(words)):
        texts = []
        for length in lengths:
            end = _end(words, begin, length)
            texts.append("".join(words[begin:end]))
            begin = end
        if len(texts[-1]) < CONTINUATION_CHARACTERS:
            return
        yield {"id": str(number), "passages": [texts[0].lstrip(), *texts[1:-1]], "continuation": texts[-1]}


def _end(words: Sequence[str], begin: int, characters: int) -> int:
    """Behind the first word with which those from ``begin`` on have that many characters."""
    length = 0
    for end in range(begin, len(words)):
        length += len(words[end])
        if length >= characters:
            return end + 1
    return len(words)
