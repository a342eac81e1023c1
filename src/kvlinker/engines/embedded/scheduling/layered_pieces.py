"""Chooses pieces of prompts of which steps compute some layers, beside requests that decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.scheduling.throughput import ComputeThroughput
from kvlinker.linking.plan import Range

LEAST_PIECE = 4
"""The fewest tokens that one prompt gets in a step, whatever they take: reading the KV before them
costs the same for one token."""

MOST_SLOWDOWN = 1.25
"""A prompt is computed so, even if that takes up to so many times as long, where ``LEAST_PIECE``
tokens take longer than the seconds that a step has for prompts: who decodes would wait for them."""

PIECE_STEPS = 10
"""The steps that a piece should take: whoever comes meanwhile waits for its end."""

LEAST_LAYERED_TOKENS = 16
"""The fewest tokens of such a piece, as long as more are left: attention computes so many at
once."""

PIECES_FOR_OTHERS = 3
"""The pieces that others get until the prompt whose turn came first gets one."""


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPiece:
    """The next tokens of a prompt. They are left to compute until all of their layers are done."""

    request: Request
    batch: Batch
    tokens: int


class LayeredPieces:
    """Chooses one piece at a time, which goes on until it is done or its request runs no more.

    Tokens of a prompt in a step with those that decode share the reading of weights with them, but
    all KV before them is read for few; a piece reads both once. So a prompt's beginning is mostly
    computed with what decodes, and the rest in pieces.
    """

    def __init__(
        self,
        throughput: ComputeThroughput,
        takes: Callable[[Batch], bool],
        *,
        most_tokens: int,
    ) -> None:
        """``takes`` returns whether layers of a batch can be computed apart; ``most_tokens`` is the
        most that a piece may have, 0 for no pieces."""
        self._throughput = throughput
        self._takes = takes
        self._most_tokens = most_tokens
        self._for_others = 0
        self.piece: LayeredPiece | None = None
        """The piece that has begun."""

    def begin(self, prompts: Sequence[Request], seconds: float) -> LayeredPiece | None:
        """Begin a piece of the first of the ``prompts`` that pieces suit, or of the one whose turn
        came first when others have had theirs; None where they suit none. Steps have ``seconds``
        for prompts."""
        eldest = min(prompts, key=lambda request: request.turn)
        order = [eldest, *prompts] if self._for_others >= PIECES_FOR_OTHERS else prompts
        for request in order:
            batch = self._batch(request, self._size(request, seconds))
            if batch is not None:
                self.piece = LayeredPiece(request, batch, len(batch.tokens))
                self._for_others = 0 if request is eldest else self._for_others + 1
                break
        return self.piece

    def suits(self, request: Request, seconds: float) -> bool:
        """Return whether layers of a prompt can be computed apart, and are worth it in steps that
        have ``seconds`` for prompts."""
        return self._batch(request, min(self._size(request, seconds), 1)) is not None

    def _size(self, request: Request, seconds: float) -> int:
        """Return how many tokens a piece of this prompt should have; 0 if what is left of it fits
        into a step, or takes less time with what decodes."""
        cost = self._throughput.cost_beside_decoding()
        if cost is None or not self._most_tokens:
            return 0
        weights, pending = self._throughput.weights_seconds or 0.0, request.pending
        fitting, left = cost.affordable(pending, seconds), _count(pending)
        if left <= fitting:
            return 0
        affordable = cost.affordable(pending, PIECE_STEPS * seconds)
        apart = min(max(affordable, LEAST_LAYERED_TOKENS), self._most_tokens, left)
        mixed = min(max(fitting, LEAST_PIECE), left)
        each_apart = (weights + cost.of_first(apart, pending)) / apart
        each_mixed = cost.of_first(mixed, pending) / mixed
        allowed = MOST_SLOWDOWN if mixed > fitting else 1.0
        return apart if each_apart < allowed * each_mixed else 0

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
        """Return the request's next tokens as a batch, if there are any, and their layers can be
        computed apart. Tokens of the prompt are apart from generated ones, which may be
        recorded."""
        sequence = request.sequence
        assert sequence is not None
        if not tokens or request.kind is not ResultKind.ANSWER or sequence.indivisible:
            return None
        length = sequence.prompt_length
        prompt = [(begin, min(end, length)) for begin, end in sequence.pending if begin < length]
        runs, visible = sequence.peek(min(tokens, _count(prompt) or tokens))
        batch = Batch(tuple(runs), {sequence: visible})
        return batch if self._takes(batch) else None


def _count(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)
