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

MOST_DELAY = 2.0
"""A prompt is computed so, even if that takes longer, where ``LEAST_PIECE`` tokens with those that
decode would take more than so many times the seconds that a step has for prompts."""

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
        first = next((each for each in order if self.suits(each, seconds)), None)
        if first is None:
            return None
        batch = self._batch(first, self._size(first, seconds))
        if batch is not None:
            self.piece = LayeredPiece(first, batch, len(batch.tokens))
            self._for_others = 0 if first is eldest else self._for_others + 1
        return self.piece

    def suits(self, request: Request, seconds: float) -> bool:
        """Return whether layers of a prompt can be computed apart, and are worth it: more tokens
        are left than fit into a step, which has ``seconds`` for them, and a piece takes less time
        for each, or steps would take too long."""
        cost = self._throughput.cost_beside_decoding()
        if cost is None or not self._most_tokens:
            return False
        weights, pending = self._throughput.weights_seconds or 0.0, request.pending
        fitting, left = cost.affordable(pending, seconds), _count(pending)
        if left <= fitting:
            return False
        mixed, apart = min(max(fitting, LEAST_PIECE), left), self._size(request, seconds)
        mixed_seconds, apart_seconds = (cost.of_first(each, pending) for each in (mixed, apart))
        quicker = (weights + apart_seconds) / apart < mixed_seconds / mixed
        delays = mixed_seconds > MOST_DELAY * seconds
        return (quicker or delays) and self._batch(request, 1) is not None

    def _size(self, request: Request, seconds: float) -> int:
        """Return the number of tokens of a piece of this prompt."""
        cost = self._throughput.cost_beside_decoding()
        assert cost is not None
        affordable = cost.affordable(request.pending, PIECE_STEPS * seconds)
        return min(
            max(affordable, LEAST_LAYERED_TOKENS), self._most_tokens, _count(request.pending)
        )

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
        """Return the request's next tokens as a batch, if its layers can be computed apart. Tokens
        of the prompt are apart from generated ones, which may be recorded."""
        sequence = request.sequence
        assert sequence is not None
        if request.kind is not ResultKind.ANSWER or sequence.indivisible:
            return None
        length = sequence.prompt_length
        prompt = [(begin, min(end, length)) for begin, end in sequence.pending if begin < length]
        runs, visible = sequence.peek(min(tokens, _count(prompt) or tokens))
        batch = Batch(tuple(runs), {sequence: visible})
        return batch if self._takes(batch) else None


def _count(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)
