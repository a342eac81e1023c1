"""Chooses pieces of prompts of which steps compute some layers, beside requests that decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.scheduling.throughput import TokenCost

WORTHWHILE_STEPS = 4
"""A prompt is computed so if it would take more than so many steps otherwise. Of a shorter one,
tokens that decode and its own share the reading of weights."""

PIECE_STEPS = 10
"""The steps that a piece should take: whoever comes meanwhile waits for its end."""

LEAST_PIECE_TOKENS = 16
"""The fewest tokens of a piece, as long as more are left: attention computes so many at once."""

PIECES_FOR_OTHERS = 3
"""The pieces that others get until the prompt whose turn came first gets one."""


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPiece:
    """The next tokens of a prompt. They are left to compute until all of their layers are done."""

    request: Request
    batch: Batch
    tokens: int


class LayeredPieces:
    """Chooses one piece at a time, which goes on until it is done or its request runs no more."""

    def __init__(self, takes: Callable[[Batch], bool], *, most_tokens: int) -> None:
        """``takes`` returns whether layers of a batch can be computed apart; ``most_tokens`` is the
        most that a piece may have."""
        self._takes = takes
        self._most_tokens = most_tokens
        self._for_others = 0
        self.piece: LayeredPiece | None = None
        """The piece that has begun."""

    def begin(
        self, prompts: Sequence[Request], cost: TokenCost, seconds: float
    ) -> LayeredPiece | None:
        """Begin a piece of the first of the ``prompts`` that pieces suit, or of the one whose turn
        came first when others have had theirs; None where they suit none. Steps have ``seconds``
        for prompts."""
        eldest = min(prompts, key=lambda request: request.turn)
        order = [eldest, *prompts] if self._for_others >= PIECES_FOR_OTHERS else prompts
        first = next((each for each in order if self.suits(each, cost, seconds)), None)
        if first is None:
            return None
        affordable = max(cost.affordable(first.pending, PIECE_STEPS * seconds), LEAST_PIECE_TOKENS)
        batch = self._batch(first, min(affordable, self._most_tokens))
        if batch is not None:
            self.piece = LayeredPiece(first, batch, len(batch.tokens))
            self._for_others = 0 if first is eldest else self._for_others + 1
        return self.piece

    def suits(self, request: Request, cost: TokenCost, seconds: float) -> bool:
        """Return whether layers of a prompt can be computed apart, and are worth it: it takes many
        steps otherwise, which have ``seconds`` for it."""
        left = sum(end - begin for begin, end in request.pending)
        fitting = max(cost.affordable(request.pending, seconds), 1)
        return left > WORTHWHILE_STEPS * fitting and self._batch(request, 1) is not None

    def finish(self, piece: LayeredPiece) -> None:
        """Mark the tokens of a piece as done: all of their layers are computed."""
        sequence = piece.request.sequence
        assert self.piece is piece
        assert sequence is not None
        sequence.take(piece.tokens)
        self.piece = None

    def drop(self, request: Request) -> None:
        """Give up the piece of a request that runs no more, if there is one."""
        if self.piece is not None and self.piece.request is request:
            self.piece = None

    def _batch(self, request: Request, tokens: int) -> Batch | None:
        """Return the request's next tokens as a batch, if its layers can be computed apart."""
        sequence = request.sequence
        assert sequence is not None
        if request.kind is not ResultKind.ANSWER or sequence.indivisible:
            return None
        runs, visible = sequence.peek(tokens)
        batch = Batch(tuple(runs), {sequence: visible})
        return batch if self._takes(batch) else None
