"""Makes traffic from a seed: a library of documents, conversations about some of them, and when
they arrive.

Everything is an immutable value that follows from its seed alone, so that every competitor gets the
same traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvlinker.base.errors import InvalidRequestError

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation: the user's message, and the tokens of the answer."""

    documents: tuple[int, ...]
    """The documents before the question: their numbers in the library."""
    question: str
    output_tokens: int
    """The exact number of tokens to be generated."""
    think_seconds: float = 0.0
    """Seconds from the end of the answer before to this turn."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Holds turns of which each follows on the answer to the one before."""

    turns: tuple[Turn, ...]
    preamble: tuple[int, ...] = ()
    """The documents in the system prompt: their numbers in the library."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Describes traffic; lengths are in tokens of the model that is served."""

    kind: str = "documents"
    """A name in ``KINDS``."""
    library: int = 24
    """The number of documents."""
    chunks: int = 4
    """Documents of a conversation's first prompt."""
    chunk_tokens: int = 512
    """The length of each document."""
    fresh_tokens: int = 32
    """The length of each question."""
    output_tokens: tuple[int, int] = (32, 32)
    """The least and the most tokens of an answer; lengths between are equally likely."""
    turns: int = 4
    """Turns of a conversation, in kinds that have several."""
    think_seconds: float = 1.0
    """Seconds from an answer to a user's next turn."""
    zipf: float = 1.0
    """The exponent of the documents' popularity: the one of rank r is asked for in proportion to r
    ** -zipf."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidRequestError(
                f"Unknown traffic {self.kind!r}; known are {', '.join(KINDS)}.", param="traffic"
            )
        needed = self.chunks + (self.kind != "documents")
        if self.library < needed:
            raise InvalidRequestError(
                f"A library of {self.library} documents is too small: {self.kind} with"
                f" {self.chunks} chunks need {needed}.",
                param="library",
            )
        least, most = self.output_tokens
        if not 1 <= least <= most:
            raise InvalidRequestError(
                f"Answers of {least} to {most} tokens are none.", param="output_tokens"
            )

    @property
    def requests_per_conversation(self) -> int:
        """The number of requests that a conversation makes."""
        return 1 if self.kind == "documents" else self.turns


def make_library(shape: TrafficShape, characters_per_token: float, *, seed: int) -> tuple[str, ...]:
    """Make the texts of all documents, of random words; no two begin alike."""
    generator = np.random.default_rng([seed, 0])
    length = round(shape.chunk_tokens * characters_per_token)
    return tuple(random_text(generator, length) for _ in range(shape.library))


def make_conversations(
    shape: TrafficShape, count: int, characters_per_token: float, *, seed: int
) -> tuple[Conversation, ...]:
    """Make ``count`` conversations of the shape's kind."""
    generator = np.random.default_rng([seed, 1])
    maker = _Maker(shape, round(shape.fresh_tokens * characters_per_token), generator)
    return tuple(KINDS[shape.kind](maker) for _ in range(count))


def poisson_arrivals(rate: float, count: int, *, seed: int) -> tuple[float, ...]:
    """Draw when ``count`` conversations arrive, in seconds: a Poisson process of ``rate`` a second,
    of which ``count`` arrive within ``count / rate`` seconds.

    Given the number of arrivals, the times of a Poisson process are independent and uniform. The
    rate of few arrivals is therefore the named one, where an unconditioned process would miss it by
    1/√count.
    """
    generator = np.random.default_rng([seed, 2])
    return tuple(np.sort(generator.uniform(0, count / rate, count)).tolist())


def random_text(generator: np.random.Generator, characters: int) -> str:
    """Make exactly this many characters: random words of two to four syllables, and a line's
    end."""
    words: list[str] = []
    length = 0
    while length < characters:
        syllables = generator.integers(
            0, (len(_CONSONANTS), len(_VOWELS)), (generator.integers(2, 5), 2)
        )
        words.append(
            "".join(_CONSONANTS[consonant] + _VOWELS[vowel] for consonant, vowel in syllables)
        )
        length += len(words[-1]) + 1
    return " ".join(words)[: max(characters - 1, 0)] + "\n"


@dataclass(frozen=True, slots=True)
class _Maker:
    """Draws the parts of conversations."""

    shape: TrafficShape
    question_characters: int
    generator: np.random.Generator

    def turn(self, documents: Sequence[int], *, think_seconds: float = 0.0) -> Turn:
        least, most = self.shape.output_tokens
        question = random_text(self.generator, self.question_characters)
        return Turn(
            tuple(documents), question, int(self.generator.integers(least, most + 1)), think_seconds
        )

    def documents(self, count: int, *, but: Sequence[int] = ()) -> list[int]:
        """Draw different documents by their popularity, in random order, none of ``but``."""
        weights = np.arange(1, self.shape.library + 1, dtype=np.float64) ** -self.shape.zipf
        weights[list(but)] = 0
        return [
            int(one)
            for one in self.generator.choice(
                len(weights), count, replace=False, p=weights / weights.sum()
            )
        ]


def _documents(maker: _Maker) -> Conversation:
    """Ask one question about several documents, as retrieval puts them into a prompt."""
    return Conversation((maker.turn(maker.documents(maker.shape.chunks)),))


def _conversation(maker: _Maker) -> Conversation:
    """Ask about several documents, then turn by turn about one more, after some time to think."""
    shown = maker.documents(maker.shape.chunks)
    turns = [maker.turn(shown)]
    for _ in range(maker.shape.turns - 1):
        # Once everything has been shown, any document may come again.
        (another,) = maker.documents(1, but=shown if len(shown) < maker.shape.library else ())
        shown.append(another)
        turns.append(maker.turn([another], think_seconds=maker.shape.think_seconds))
    return Conversation(tuple(turns))


def _agent(maker: _Maker) -> Conversation:
    """Give an agent a task after descriptions of tools, which are the same for all, then the result
    of each step."""
    tools = range(maker.shape.chunks)
    turns = [maker.turn([])]
    turns += [maker.turn(maker.documents(1, but=tools)) for _ in range(maker.shape.turns - 1)]
    return Conversation(tuple(turns), preamble=tuple(tools))


KINDS: Mapping[str, Callable[[_Maker], Conversation]] = MappingProxyType(
    {"documents": _documents, "conversation": _conversation, "agent": _agent}
)
"""The functions that make a conversation, by the kind of traffic."""
