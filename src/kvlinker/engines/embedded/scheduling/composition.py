"""Composes a step: which tokens of which running requests it computes, by the time that they
take."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kvlinker.engines.embedded.execution.batch import Batch, Run, VisibleKV
from kvlinker.engines.embedded.requests.request import Request, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.engines.embedded.scheduling.throughput import (
    ComputeThroughput,
    TokenCost,
    count_tokens,
)
from kvlinker.prompting.segments import Range

IDLE_MULTIPLE = 2.25
"""The duration of a step with prompts where no target is set, as a multiple of a step that only
decodes: the running decoding requests, and all answers but one that soon decode. Chosen by hand."""

SOON_STEPS = 20
"""The number of steps that only decode within which the rest of a prompt must be computed for its
answer to count as decoding soon. Chosen by hand."""

MIXED_STEPS = 15
"""The number of steps in a row that may both prefill and decode. The one that follows only decodes,
and measures how long that takes now. Chosen by hand: it costs a sixteenth of the prompts' time."""

PROMPT_SHARE_MINIMUM = 0.25
"""The smallest time of prompts in a step, as a share of a step that only decodes, however tight the
target. Chosen by hand."""

ELDEST_SHARE = 0.25
"""The share of the prompts' time that goes to the one whose turn came first, however long it is.
Chosen by hand."""

QUICK_SHARE = 0.5
"""The share of the prompts' time in a step beside decoding within which the rest of a quick prompt
is computed. Chosen by hand."""

BACKGROUND_SECONDS = 0.05
"""The longest step for a request in the background, in seconds: requests that arrive meanwhile wait
for its end. Chosen by hand."""

BACKGROUND_TOKENS = 32
"""The smallest number of tokens of such a step, as long as more are left: shorter ones mostly wait
for memory."""

PIECE_MINIMUM = 4
"""The smallest number of tokens that one prompt gets in a step, whatever their time: reading the KV
before them costs the same for one token."""

SLOWDOWN_LIMIT = 1.25
"""The largest slowdown of a prompt by layered pieces where ``PIECE_MINIMUM`` tokens take longer
than the seconds that a step has for prompts: decoding requests would wait for them. Chosen by
hand."""

PIECE_STEPS = 10
"""The number of steps that a layered piece should take: requests that arrive meanwhile wait for its
end. Chosen by hand."""

LAYERED_MINIMUM = 16
"""The smallest number of tokens of a layered piece, as long as more are left: the rows that
attention computes at once."""

PIECES_FOR_OTHERS = 3
"""The number of pieces of other prompts until the one whose turn came first gets one. Chosen by
hand."""

ONE_PER_TOKEN = TokenCost(1.0, 0.0)
"""Counts tokens instead of time."""

BY_TURN = attrgetter("turn")


@dataclass(frozen=True, slots=True, eq=False)
class LayeredPiece:
    """The next tokens of a prompt. They are left to compute until all of their layers are done."""

    request: Request
    batch: Batch
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step: runs to compute for ``requests``, and layers of a ``piece`` behind
    them."""

    batch: Batch
    requests: tuple[Request, ...]
    piece: LayeredPiece | None = None
    seconds: float = math.inf
    """How long the step may take, layers of the piece included."""


class LayeredPieces:
    """Chooses one piece at a time, which goes on until it is done or its request runs no more.

    Tokens of a prompt in a step with requests that decode share the reading of weights with them,
    but all KV before them is read for few; a piece reads both once. So a prompt's beginning is
    mostly computed beside decoding, and the rest in pieces.
    """

    def __init__(
        self,
        throughput: ComputeThroughput,
        accepts: Callable[[Batch], bool],
        *,
        token_limit: int,
    ) -> None:
        """``accepts`` returns whether layers of a batch can be computed apart; ``token_limit`` is
        the largest number of a piece's tokens, 0 for no pieces."""
        self._throughput = throughput
        self._accepts = accepts
        self._token_limit = token_limit
        self._for_others = 0
        self.piece: LayeredPiece | None = None
        """The piece that has begun."""

    def begin(self, prompts: Sequence[Request], seconds: float) -> LayeredPiece | None:
        """Begin a piece of the first of the ``prompts`` that pieces suit, or of the one whose turn
        came first when others have had theirs; None where they suit none. Steps have ``seconds``
        for prompts."""
        if not self._token_limit:
            return None
        eldest = min(prompts, key=BY_TURN)
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
        """Return the number of tokens of a piece of this prompt; 0 if the rest of it fits into a
        step, or takes less time beside decoding."""
        cost = self._throughput.cost_beside_decoding
        if cost is None or not self._token_limit:
            return 0
        weights, pending = self._throughput.weights_seconds or 0.0, request.pending
        fitting, left = cost.affordable(pending, seconds), count_tokens(pending)
        if left <= fitting:
            return 0
        affordable = cost.affordable(pending, PIECE_STEPS * seconds)
        apart = min(max(affordable, LAYERED_MINIMUM), self._token_limit, left)
        mixed = min(max(fitting, PIECE_MINIMUM), left)
        each_apart = (weights + cost.of_first(apart, pending)) / apart
        each_mixed = cost.of_first(mixed, pending) / mixed
        allowed = SLOWDOWN_LIMIT if mixed > fitting else 1.0
        return apart if each_apart < allowed * each_mixed else 0

    def finish(self, piece: LayeredPiece) -> None:
        """Mark the tokens of a piece as done: all of their layers are computed."""
        assert self.piece is piece
        sequence_of(piece.request).take(piece.tokens)
        self.piece = None

    def drop(self, request: Request) -> None:
        """Drop the piece of a request that runs no more, if there is one."""
        if self.piece is not None and self.piece.request is request:
            self.piece = None

    def _batch(self, request: Request, tokens: int) -> Batch | None:
        """Return the request's next tokens as a batch, if there are any, and their layers can be
        computed apart. Tokens of the prompt are apart from generated ones, which may be
        recorded."""
        sequence = sequence_of(request)
        if not tokens or request.kind is not ResultKind.ANSWER or sequence.indivisible:
            return None
        length = sequence.prompt_length
        prompt = [(begin, min(end, length)) for begin, end in sequence.pending if begin < length]
        runs, visible = sequence.peek(min(tokens, count_tokens(prompt) or tokens))
        batch = Batch(tuple(runs), {sequence: visible})
        return batch if self._accepts(batch) else None


@dataclass(slots=True)
class _Budget:
    """Counts down the time of a step that prompts may still take."""

    cost: TokenCost
    """The cost of computing tokens, by their positions."""

    amount: float
    """The cost that may still be spent: seconds, or tokens with ``ONE_PER_TOKEN``."""

    tokens: int
    """The number of tokens that may still be taken."""

    usual: float = math.inf
    """The seconds that prompts may take in a step beside decoding that makes up for no earlier one;
    infinity where nothing was measured."""

    step_seconds: float = math.inf
    """How long the whole step may take."""

    def fitting(self, request: Request, share: float = 1.0) -> int:
        """Return how many of the request's next tokens fit into this share; of an indivisible
        prompt all, if anything is left."""
        sequence = sequence_of(request)
        if self.amount <= 0 or self.tokens <= 0:
            return 0
        if sequence.indivisible:
            length = sequence.prompt_length
            return count_tokens([each for each in sequence.pending if each[0] < length])
        return min(
            self.cost.affordable(sequence.pending, share * self.amount), int(share * self.tokens)
        )

    def spend(self, request: Request, tokens: int) -> None:
        """Subtract the cost of the request's next ``tokens`` from the budget; a negative number
        adds it."""
        spent = self.cost.of_first(abs(tokens), sequence_of(request).pending)
        self.amount -= spent if tokens > 0 else -spent
        self.tokens -= tokens


class StepComposer:
    """Fills steps. Every request that decodes is in every step; prompts get the rest of the step's
    time.

    While requests decode, a step is to take no longer than the target: the setting, or a multiple
    of the step that only decodes. That multiple counts answers that wait with short prompts, too:
    otherwise few requests would decode while many waited, in short steps, which take longer per
    token. While none decodes, a step holds as many tokens as memory is made for. The time of
    prompts goes first to the tenant that has had least so far, and to the shortest of its prompts;
    but a share of it goes to the prompt whose turn came first, so that none starves. Of each
    tenant, one prompt whose rest is quick comes before all of that. Where prompts end in a step in
    which none decodes, the others get little of it: first tokens come with its end. A request in
    the background has steps for itself, short ones, and only while there is no other.

    An indivisible prompt may exceed the budget. Then prompts wait until decoding has caught up with
    its target, so that the mean time per token keeps it.

    A long prompt beside requests that decode is computed in pieces of more tokens than fit into a
    step, some layers in each (``LayeredPieces``), where the engine can do that.

    The scheduler calls the methods under its lock.
    """

    def __init__(
        self,
        throughput: ComputeThroughput,
        *,
        max_step_tokens: int,
        seconds_per_token: float | None = None,
        pieces: LayeredPieces,
    ) -> None:
        """``max_step_tokens`` is the most tokens of a step, ``seconds_per_token`` the target for
        requests that decode; None to take ``IDLE_MULTIPLE``. ``pieces`` chooses what is computed
        some layers at a time."""
        self._throughput = throughput
        self.pieces = pieces
        self._max_step_tokens = max_step_tokens
        self._seconds_per_token = seconds_per_token
        self._mixed = 0  # steps in a row that both prefill and decode
        self._owed = 0.0  # seconds by which prompts have exceeded their time
        self._eldest_due = 0.0  # shares of steps that are due to the prompt whose turn came first

        # seconds of prompts, by tenant; a new tenant begins with the least
        self._served: dict[str, float] = {}
        self._least_served = 0.0
        self.prompt_share = 1.0
        """The share of the last step's time that was for prompts."""

    def compose(self, running: Sequence[Request]) -> Step | None:
        """Take the next tokens of ``running`` requests, and mark them as done; None where there is
        nothing to compute."""
        wanted = [request for request in running if request.kind is not ResultKind.BACKGROUND]
        if not wanted:
            return _step([(request, self._background_piece(request)) for request in running])
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in wanted:
            sequence = sequence_of(request)
            if sequence.decoding:
                decoding.append(request)
            elif sequence.pending:
                prompts.append(request)
        del decoding[self._max_step_tokens :]
        budget = self._budget(decoding, prompts)
        granted = [(request, 1) for request in decoding]
        piece = self.pieces.piece
        if prompts:
            ordered = self._in_order(prompts, budget.usual)
            if piece is None and decoding and budget.amount > 0:
                piece = self.pieces.begin(ordered, budget.usual)
            if piece is None:
                shared = self._divide(budget, ordered)
            elif decoding:
                shared = self._divide_beside(piece, budget, ordered)
            else:
                others = [each for each in ordered if each is not piece.request]
                shared = self._divide(budget, others)
            if not decoding:
                shared = self._shortened(shared, budget.usual)
            self._note_served(shared)
            self._mixed = self._mixed + 1 if decoding and shared else 0
            if decoding and any(sequence_of(request).indivisible for request, _ in shared):
                self._owed += max(0.0, -budget.amount)
            granted += shared
        return _step(granted, piece, budget.step_seconds)

    def _background_piece(self, request: Request) -> int:
        """Return how many of the next tokens of a request in the background a step computes."""
        cost = self._throughput.cost_beside_decoding
        pending = sequence_of(request).pending
        affordable = 0 if cost is None else cost.affordable(pending, BACKGROUND_SECONDS)
        return min(max(affordable, BACKGROUND_TOKENS), self._max_step_tokens)

    def _divide(self, budget: _Budget, prompts: Sequence[Request]) -> list[tuple[Request, int]]:
        """Divide the budget among ``prompts``, the first ones first. The one whose turn came first
        gets what is due to it before; at least ``PIECE_MINIMUM`` tokens go to one of the two."""
        if not prompts or budget.amount <= 0 or budget.tokens <= 0:
            return []
        eldest, reserved = min(prompts, key=BY_TURN), 0
        if eldest is not prompts[0]:
            reserved = self._settle_with(eldest, budget)
            budget.spend(eldest, reserved)
        least = min(PIECE_MINIMUM, budget.tokens)
        granted = []
        for request in prompts:
            if reserved and request is eldest:
                budget.spend(eldest, -reserved)
                tokens = max(reserved, budget.fitting(eldest))
            elif not reserved and request is prompts[0]:
                tokens = max(least, budget.fitting(request))
            else:
                tokens = budget.fitting(request)
            if tokens:
                budget.spend(request, tokens)
                granted.append((request, tokens))
        return granted

    def _divide_beside(
        self, piece: LayeredPiece, budget: _Budget, ordered: Sequence[Request]
    ) -> list[tuple[Request, int]]:
        """Divide the budget among a piece and the prompts that come before its own and get no
        pieces. The piece gets ``ELDEST_SHARE`` of it, or what is left; the prompt whose turn came
        first gets what is due to it, if it comes behind and gets no pieces."""
        place = ordered.index(piece.request)
        ahead = [each for each in ordered[:place] if not self.pieces.suits(each, budget.usual)]
        eldest = min(ordered, key=BY_TURN)
        share = max(0.0, ELDEST_SHARE * budget.amount)
        shared = []
        if eldest in ordered[place + 1 :] and not self.pieces.suits(eldest, budget.usual):
            due = self._settle_with(eldest, budget)
            if due:
                budget.spend(eldest, due)
                shared.append((eldest, due))
        budget.amount -= share
        shared += self._divide(budget, ahead)
        self._served[piece.request.tenant] += share + max(0.0, budget.amount)
        return shared

    def _settle_with(self, eldest: Request, budget: _Budget) -> int:
        """Return how many tokens the prompt whose turn came first gets in this step at least, and
        count them as paid: ``ELDEST_SHARE`` of it, or ``PIECE_MINIMUM`` in some steps where these
        take more than that."""
        least, fitting = min(PIECE_MINIMUM, budget.tokens), budget.fitting(eldest, ELDEST_SHARE)
        if fitting >= least or budget.amount <= 0:
            return fitting
        self._eldest_due = min(self._eldest_due, 0.0) + ELDEST_SHARE  # nothing is saved up
        if self._eldest_due < 0:
            return 0
        pending = sequence_of(eldest).pending
        self._eldest_due -= budget.cost.of_first(least, pending) / budget.amount
        return least

    def _budget(self, decoding: Sequence[Request], prompts: Sequence[Request]) -> _Budget:
        """Return the budget of ``prompts``, in addition to the requests that decode."""
        tokens = self._max_step_tokens - len(decoding)
        cost = self._throughput.cost_beside_decoding
        self.prompt_share = 1.0
        if not decoding or cost is None:
            self._owed = 0.0
            ends = _last_tokens(prompts, math.inf)
            known = ends and cost is not None
            first = self._throughput.decode_seconds([min(ends)]) if known else None
            usual = math.inf if first is None else self._seconds_beside(first, first)
            return _Budget(ONE_PER_TOKEN, tokens, tokens, usual)
        positions = [part for request in decoding for part in sequence_of(request).pending]
        idle = self._throughput.decode_seconds(positions)
        if idle is None or self._mixed >= MIXED_STEPS:
            idle = idle or 0.0
            return _Budget(cost, 0.0, tokens, step_seconds=idle)  # this step measures it
        behind = _last_tokens(prompts, SOON_STEPS * idle)[1:]
        soon = self._throughput.decode_seconds([*positions, *behind])
        seconds = self._seconds_beside(idle, soon or idle)
        self.prompt_share = seconds / (idle + seconds)
        paid = min(self._owed, seconds)
        self._owed -= paid
        return _Budget(cost, seconds - paid, tokens, seconds, idle + seconds - paid)

    def _seconds_beside(self, idle: float, soon: float) -> float:
        """Return the seconds of prompts in a step that takes ``idle`` seconds without them, and
        ``soon`` once others decode, too."""
        target = self._seconds_per_token or IDLE_MULTIPLE * soon
        return max(target - idle, PROMPT_SHARE_MINIMUM * idle)

    def _shortened(
        self, shared: Sequence[tuple[Request, int]], seconds: float
    ) -> list[tuple[Request, int]]:
        """Return the shares of prompts in a step in which none decodes. Where some prompts end in
        it, those that do not are cut to what they would get beside decoding (``seconds``), or to
        ``ELDEST_SHARE`` of the step."""
        cost = self._throughput.cost_beside_decoding
        if cost is None or len(shared) < 2:
            return list(shared)
        ending = [each for each in shared if _ends(*each)]
        if not ending or len(ending) == len(shared):
            return list(shared)
        spent = sum(cost.of_first(tokens, sequence_of(each).pending) for each, tokens in ending)
        left = max(seconds, spent * ELDEST_SHARE / (1 - ELDEST_SHARE))
        shortened = []
        for request, tokens in shared:
            if (request, tokens) not in ending:
                pending = sequence_of(request).pending
                tokens = min(tokens, max(cost.affordable(pending, left), PIECE_MINIMUM))
                left -= cost.of_first(tokens, pending)
            shortened.append((request, tokens))
        return shortened

    def _in_order(self, prompts: Sequence[Request], seconds: float) -> list[Request]:
        """Order prompts: those of the tenant that was served least come first, of one tenant's the
        shortest, and chunks without a waiting answer come after all answers. Before them comes one
        of each tenant that is quick in steps that have ``seconds`` for prompts."""
        tenants = {request.tenant for request in prompts}
        for tenant in tenants:
            self._served[tenant] = max(self._served.get(tenant, 0.0), self._least_served)
        self._least_served = min([self._served[tenant] for tenant in tenants])

        def order(request: Request) -> tuple[float, ...]:
            assert request.number is not None
            return (
                request.deferral,
                self._served[request.tenant],
                request.seconds_left,
                request.number,
            )

        ordered = sorted(prompts, key=order)
        quick: dict[str, Request] = {}
        for request in ordered:
            if self._is_quick(request, seconds):
                quick.setdefault(request.tenant, request)
        return list(dict.fromkeys([*quick.values(), *ordered]))

    def _is_quick(self, request: Request, seconds: float) -> bool:
        """Return whether the rest of an answer's prompt takes little of ``seconds``."""
        cost = self._throughput.cost_beside_decoding
        if cost is None or seconds == math.inf or request.kind is not ResultKind.ANSWER:
            return False
        return cost.of(sequence_of(request).pending) <= QUICK_SHARE * seconds

    def _note_served(self, granted: Sequence[tuple[Request, int]]) -> None:
        """Note the time that tenants get of a step."""
        cost = self._throughput.cost_beside_decoding
        if cost is not None:
            for request, tokens in granted:
                self._served[request.tenant] += cost.of_first(tokens, sequence_of(request).pending)


def sequence_of(request: Request) -> TokenSequence:
    """Return the sequence of a request that is loaded."""
    assert request.sequence is not None
    return request.sequence


def _step(
    granted: Sequence[tuple[Request, int]],
    piece: LayeredPiece | None = None,
    seconds: float = math.inf,
) -> Step | None:
    """Return a step of at most ``seconds`` that takes a number of tokens of each request, which are
    marked as done, and layers of a piece; None for one without both."""
    runs: list[Run] = []
    visible_kv: dict[object, VisibleKV] = {}
    requests: list[Request] = []
    for request, tokens in granted:
        sequence = sequence_of(request)
        taken, visible_kv[sequence] = sequence.take(tokens)
        runs += taken
        requests.append(request)
    if not runs and piece is None:
        return None
    return Step(Batch(tuple(runs), visible_kv), tuple(requests), piece, seconds)


def _ends(request: Request, tokens: int) -> bool:
    """Return whether the prompt of a request ends within its next ``tokens``."""
    sequence = sequence_of(request)
    return sequence.indivisible or tokens >= count_tokens(sequence.pending)


def _last_tokens(prompts: Sequence[Request], seconds: float) -> list[Range]:
    """Return the positions of the last prompt tokens of those answers among ``prompts`` that need
    no more than ``seconds`` until then."""
    ends = []
    for request in prompts:
        if request.kind is ResultKind.ANSWER and request.seconds_left <= seconds:
            length = sequence_of(request).prompt_length
            ends.append((length - 1, length))
    return ends
