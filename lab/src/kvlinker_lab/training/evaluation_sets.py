"""Writes the data sets that ship with kvlinker: questions on worlds of people that the reader never
met, and prose.

Run as ``python -m kvlinker_lab.training.evaluation_sets`` to write the files again, after the
generator has changed. Filler of the questions comes from the grammar of `prose` alone, so that
everything in them is generated.

The prose is to be scored behind chunks of the prose before it. Its paragraphs follow each other as
they stand in their source, with an empty line between. Texts are cut in front of words, wherever
they are long enough, so that chunks begin and end anywhere, as windows over documents do.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvlinker_lab.training.prose import held_out_paragraphs
from kvlinker_lab.training.questions import HARD_KINDS, KINDS, Kind, Question, WorldSettings
from kvlinker_lab.training.worlds import build_world

FOLDER = Path(__file__).parents[4] / "src" / "kvlinker" / "quality" / "evaluation" / "data"


class Bundled(NamedTuple):
    """Describes a file of questions that ships."""

    kinds: tuple[Kind, ...]
    per_kind: int
    """Questions of each kind."""
    words: tuple[int, int]
    """Fewest and most words of a world, of about 1.45 tokens each."""
    choices: bool = False
    """True where the answer is to be chosen between the right one and another that the passages
    suggest."""


CHOICE_KINDS: tuple[Kind, ...] = ("anaphora", "bridge", "comparison", "chain", "correction")
"""The kinds whose answers have a rival."""

BUNDLED = {
    "reader": Bundled(KINDS, 100, (80, 400)),
    "reader-long": Bundled(KINDS, 30, (700, 1250)),
    "reader-hard": Bundled(HARD_KINDS, 75, (80, 400)),
    "reader-hard-long": Bundled(HARD_KINDS, 30, (700, 1250)),
    "reader-choice": Bundled(CHOICE_KINDS, 60, (80, 400), choices=True),
}
CANDIDATES = ("First answer", "Second answer")
"""The beginnings of the passages that hold the choices."""

_AGES = re.compile(r"(\w+) (\d+), (\w+) (\d+): (\d+)")
"""An answer that compares the ages of two people."""

SEED = 0
"""The seed of the shipped data sets."""

SETTINGS = WorldSettings(library_share=0, held_out=True)
MOST_WORLDS = 1000
"""Worlds in a row without a question of the wanted kind after which the generator is said not to
make it."""

PASSAGES = 6
"""The passages before each continuation."""

PASSAGE_CHARACTERS = 335
"""Characters of a passage: about 96 of the reader's tokens."""
CONTINUATION_CHARACTERS = 223
"""Characters of a continuation: about 64 tokens."""


def evaluation_set(described: Bundled, seed: int) -> Iterator[dict[str, Any]]:
    """Yield records of the format ``passages``, the kinds in turn, so that any beginning is
    balanced.

    A world has about as many words as drawn from ``words``, and is asked about once.
    """
    generators = {kind: random.Random(f"evaluation/{seed}/{kind}") for kind in described.kinds}
    for number in range(described.per_kind):
        for kind, rng in generators.items():
            yield {"id": f"{kind}-{number}"} | _record(rng, kind, described)


def _record(rng: random.Random, kind: Kind, described: Bundled) -> dict[str, Any]:
    for _ in range(MOST_WORLDS):
        world = build_world(rng, SETTINGS.about(kind), rng.randint(*described.words))
        questions = [question for question in world.questions if question.kind == kind]
        if described.choices:
            questions = [question for question in questions if rivals(question, questions)]
        if questions:
            question = rng.choice(questions)
            record: dict[str, Any] = {
                "task": kind,
                "passages": [passage + "\n\n" for passage in world.passages],
                "question": f"Question: {question.text}",
                "answers": [question.answer],
                "metric": "exact_match",
            }
            if described.choices:
                rival = rng.choice(rivals(question, questions))
                record["choices"] = sorted((question.answer, rival), key=lambda _: rng.random())
                candidates = zip(CANDIDATES, record["choices"], strict=True)
                record["passages"] += [f"{name}: {text}.\n\n" for name, text in candidates]
            return record
    raise ValueError(f"None of {MOST_WORLDS} worlds has a question of kind {kind!r}.")


def rivals(question: Question, others: Iterable[Question]) -> list[str]:
    """Return wrong answers to a question that its world suggests: what is true of others of whom
    the same can be asked, or that of the two people it compares each has the other's age (the
    number asked for is the same then, whose it is is wrong)."""
    if ages := _AGES.fullmatch(question.answer):
        one, age, other, other_age, asked_for = ages.groups()
        return [f"{one} {other_age}, {other} {age}: {asked_for}"] if age != other_age else []
    asked = _without_names(question.text)
    answers = (other.answer for other in others if _without_names(other.text) == asked)
    return list(dict.fromkeys(answer for answer in answers if answer != question.answer))


def _without_names(text: str) -> str:
    """Return a question's wording without names, which begin with a capital."""
    return re.sub(r"\b[A-Z]\w*", "", text)


def continuations(paragraphs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield as many records as the paragraphs give, one behind the other; what is left at the end
    is dropped."""
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
        yield {
            "id": str(number),
            "passages": [texts[0].lstrip(), *texts[1:-1]],
            "continuation": texts[-1],
        }


def _end(words: Sequence[str], begin: int, characters: int) -> int:
    """Return the place behind the first word with which those from ``begin`` on have that many
    characters."""
    length = 0
    for end in range(begin, len(words)):
        length += len(words[end])
        if length >= characters:
            return end + 1
    return len(words)


def main() -> None:
    """Write all files."""
    for name, described in BUNDLED.items():
        _write(name, evaluation_set(described, SEED))
    _write("prose", continuations(held_out_paragraphs()))


def _write(name: str, records: Iterable[dict[str, Any]]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    content = "".join(lines).encode()
    path = FOLDER / f"{name}.jsonl.gz"
    path.write_bytes(gzip.compress(content, mtime=0))  # equal contents give equal files
    print(f"{path}: {len(lines)} examples, {len(content) / 1e3:.0f} kB of text")


if __name__ == "__main__":
    main()
