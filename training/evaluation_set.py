"""The reader's tasks: questions on worlds of people it never met, as ``kvlinker bench quality`` asks them.

Run as ``python -m training.evaluation_set`` to write the files that ship with kvlinker again, after the generator
has changed. Filler comes from the grammar of `prose` alone, so that everything in them is generated, but for the prose
of ``continuations``.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from training.continuations import continuations
from training.prose import held_out_paragraphs
from training.questions import KINDS, Kind
from training.settings import WorldSettings
from training.worlds import build_world

FOLDER = Path(__file__).parents[1] / "src" / "kvlinker" / "evaluation" / "data"


class Bundled(NamedTuple):
    """A file that ships: questions of each kind, and fewest and most words of a world (about 1.45 tokens each)."""

    per_kind: int
    words: tuple[int, int]


BUNDLED = {"reader": Bundled(100, (80, 400)), "reader-long": Bundled(30, (700, 1250))}
SEED = 0
SETTINGS = WorldSettings(library_share=0, held_out=True)
MOST_WORLDS = 1000
"""Worlds in a row without a question of the wanted kind before the generator is said not to make that kind."""


def evaluation_set(per_kind: int, words: tuple[int, int], seed: int) -> Iterator[dict[str, Any]]:
    """Records of ``research.evaluation.datasets.passages``, the kinds in turn, so that any beginning is balanced.

    A world has about as many words as drawn from ``words``, and is asked about once.
    """
    generators = {kind: random.Random(f"evaluation/{seed}/{kind}") for kind in KINDS}
    for number in range(per_kind):
        for kind, rng in generators.items():
            yield {"id": f"{kind}-{number}"} | _record(rng, kind, words)


def _record(rng: random.Random, kind: Kind, words: tuple[int, int]) -> dict[str, Any]:
    for _ in range(MOST_WORLDS):
        world = build_world(rng, SETTINGS.about(kind), rng.randint(*words))
        questions = [question for question in world.questions if question.kind == kind]
        if questions:
            question = rng.choice(questions)
            return {
                "task": kind,
                "passages": [passage + "\n\n" for passage in world.passages],
                "question": f"Question: {question.text}",
                "answers": [question.answer],
                "metric": "exact_match",
            }
    raise ValueError(f"None of {MOST_WORLDS} worlds has a question of kind {kind!r}.")


def main() -> None:
    """Write all files."""
    for name, (per_kind, words) in BUNDLED.items():
        _write(name, evaluation_set(per_kind, words, SEED))
    _write("prose", continuations(held_out_paragraphs()))


def _write(name: str, records: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    content = "".join(lines).encode()
    path = FOLDER / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(content, mtime=0))  # equal contents give equal files
    print(f"{path}: {len(lines)} examples, {len(content) / 1e3:.0f} kB of text")


if __name__ == "__main__":
    main()
