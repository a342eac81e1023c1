"""Workflows of agents: the documents and the answers that each agent reads, in order."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WORDS_AROUND = 64
"""Tokens of a prompt at most beside its documents and answers."""


@dataclass(frozen=True)
class Turn:
    """One request: which documents the agent reads, and whose answers, by their turns' numbers."""

    agent: str
    documents: tuple[int, ...] = ()
    hears: tuple[int, ...] = ()


def _debate(rounds: int = 2, agents: int = 4) -> tuple[Turn, ...]:
    first = [Turn(f"debater {number}", (0, 1)) for number in range(agents)]
    later = [
        Turn(f"debater {number}", (0, 1), tuple(range((round - 1) * agents, round * agents)))
        for round in range(1, rounds)
        for number in range(agents)
    ]
    return (*first, *later)


SCENARIOS: Mapping[str, tuple[Turn, ...]] = {
    "planner": (
        Turn("planner", (0, 1, 2, 3)),
        Turn("worker 1", (0, 1), (0,)),
        Turn("worker 2", (2, 3), (0,)),
        Turn("worker 3", (3, 0), (0,)),
        Turn("planner again", (), (0, 1, 2, 3)),
    ),
    "debate": _debate(),
    "tools": (
        Turn("retriever", (0,)),
        Turn("reader", (1, 2, 3), (0,)),
        Turn("answerer", (3, 1), (0, 1)),
    ),
}
"""The turns of each workflow, in order."""


@dataclass(frozen=True)
class Work:
    """The sizes of a scenario."""

    workflows: int
    document_tokens: int
    answer_tokens: int
    policy: str
    """How documents and answers are linked, but under the system ``marks``."""

    def chunk_tokens(self, turns: Sequence[Turn]) -> int:
        """Return the tokens of all chunks that the workflows come to have."""
        documents = len({number for turn in turns for number in turn.documents})
        return self.workflows * (documents * self.document_tokens + len(turns) * self.answer_tokens)

    def prompt_tokens(self, turns: Sequence[Turn]) -> int:
        """Return about how many tokens all requests have, answers included."""
        return self.workflows * sum(map(self.turn_tokens, turns))

    def turn_tokens(self, turn: Turn) -> int:
        """Return about how many tokens a request has, its answer included."""
        said = (1 + len(turn.hears)) * self.answer_tokens
        return len(turn.documents) * self.document_tokens + said + WORDS_AROUND


def random_text(tokens: int, seed: str) -> str:
    """Return a text of ``tokens`` bytes. The tokenizers of the random shapes have a token for each
    byte."""
    letters = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz    ", k=tokens - 1)
    return "".join(letters) + "\n"
