"""Makes prose for language modelling and for filler between facts.

Two sources, both free to use: sentences from a small grammar (`grammar_sentence`), and English text
that comes with every Python installation under the PSF licence (`library_paragraphs`: docstrings of
the standard library and the topics of the language reference in `pydoc_data`).
"""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from functools import cache
from pathlib import Path

from kvlinker_lab.training.vocabulary import is_held_out


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("|"))


_PLACES = _phrases(
    "the market|the harbour|the old bridge|the station|the library|the park|the town hall|the mill"
    "|the square|the school|the garden|the museum|the river bank|the north gate|the bakery|the hill"
)
_THINGS = _phrases(
    "a letter|a map|a lantern|an umbrella|a basket|a ladder|a box of tools|a painting|a bench"
    "|a notebook|a clock|a ticket|a wooden table|a stone wall|a broken window|a long report"
)
_PEOPLE = _phrases(
    "a visitor|a neighbour|the workers|the children|two travellers|a group of students"
    "|some old friends|the guests|the crowd|a small committee|the owners|a few tourists"
)
_DID = _phrases(
    "waited near|walked past|met at|worked behind|stopped at|gathered around|talked about"
    "|returned to|looked at|wrote about|left|stood beside|found their way to"
)
_WEATHER = _phrases(
    "cold|warm|wet|windy|quiet|bright|foggy|dry|mild|grey|long|calm|busy|pleasant|difficult"
)
_TIMES = _phrases(
    "In the morning|At noon|In the evening|Last winter|In early spring|During the summer"
    "|A week later|On market days|After the storm|Before sunrise|Every autumn|Later that day"
    "|For a long time|At the end of the year|Once a month|In those days"
)
_VERBS = _phrases(
    "was repaired|was closed|was opened again|was painted|was moved|was sold|was forgotten"
    "|was full of people|was almost empty|was covered with snow|was rebuilt|was decorated"
)
_REASONS = _phrases(
    "because the road was blocked|because it rained|since nobody had asked|although it was late"
    "|while the bells rang|before the shops closed|when the work was done|as everybody had hoped"
    "|so that the trains could pass|after a short speech|without much noise|for the first time"
)


def grammar_sentence(rng: random.Random) -> str:
    """Make one sentence of plain English that mentions no named entity and no pronoun."""
    place, thing, people = rng.choice(_PLACES), rng.choice(_THINGS), rng.choice(_PEOPLE)
    time, did, verb = rng.choice(_TIMES), rng.choice(_DID), rng.choice(_VERBS)
    reason, weather = rng.choice(_REASONS), rng.choice(_WEATHER)
    patterns = (
        f"{time} {people} {did} {place}.",
        f"{place.capitalize()} {verb} {reason}.",
        f"{time} {place} {verb}.",
        f"The weather was {weather}, and {place} {verb}.",
        f"{people.capitalize()} {did} {place} {reason}.",
        f"There was {thing} near {place}.",
        f"{time} there was {thing} beside {place}, {reason}.",
        f"The day was {weather} and {people} carried {thing} to {place}.",
        f"{time} it was {weather}.",
        f"{thing.capitalize()} lay in front of {place} {reason}.",
    )
    return rng.choice(patterns)


@cache
def library_paragraphs() -> tuple[str, ...]:
    """Return the library's paragraphs for training."""
    return tuple(p for p in _paragraphs() if not is_held_out(p))


def held_out_paragraphs() -> tuple[str, ...]:
    """Return one paragraph in ten, which training never reads, not even as a part of another."""
    read = "\n".join(library_paragraphs())
    return tuple(p for p in _paragraphs() if is_held_out(p) and p not in read)


@cache
def _paragraphs() -> tuple[str, ...]:
    """Return paragraphs of at least 60 characters from the standard library's docstrings and
    topics."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts: list[str] = []
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(
            path.relative_to(root).parts
        ):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        texts += [ast.get_docstring(n) or "" for n in ast.walk(tree) if isinstance(n, documented)]
        if path.parent.name == "pydoc_data" and path.name == "topics.py":
            strings = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
            texts += [s for s in strings if isinstance(s, str) and len(s) > 200]
    paragraphs: dict[str, None] = {}
    for text in texts:
        for paragraph in re.split(r"\n\s*\n", text):
            line = " ".join(paragraph.split())
            if len(line) >= 60 and sum(c.isalpha() or c == " " for c in line) > 0.8 * len(line):
                paragraphs[line] = None
    return tuple(paragraphs)


@cache
def library_sentences() -> tuple[str, ...]:
    """Return sentences of 5 to 25 words from `library_paragraphs`, for use as filler."""
    found: dict[str, None] = {}
    for paragraph in library_paragraphs():
        for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z])", paragraph):
            if re.fullmatch(r"[A-Z][A-Za-z ,;'\-]+\.", sentence) and 5 <= sentence.count(" ") <= 24:
                found[sentence] = None
    return tuple(found)


def filler_sentence(rng: random.Random, library_share: float) -> str:
    """Make a sentence that says nothing about the world's entities."""
    if rng.random() < library_share:
        return rng.choice(library_sentences())
    return grammar_sentence(rng)


def paragraph(rng: random.Random) -> str:
    """Draw a paragraph for plain language modelling: three in four from the library."""
    if rng.random() < 0.75:
        return rng.choice(library_paragraphs())
    return " ".join(grammar_sentence(rng) for _ in range(rng.randint(3, 7)))
