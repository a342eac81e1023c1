"""What a request asks of the connector, as it travels to vLLM's scheduler: an immutable value, checked on arrival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.linking.plan import LinkPlan

PARAM = "kvlinker"
"""The order's name among a request's ``kv_transfer_params``."""
COMPARED_LAYER = 1
"""In which orders that compare do so: the first layer whose KV knows of other tokens."""

Key = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Position = Annotated[int, Field(ge=0, strict=True)]


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlacedChunk(_Value):
    """Put tokens [first, last) of a stored chunk into the prompt, its token i at ``start + i``, with the rotary
    embedding of position ``rotary_start + i``."""

    key: Key
    start: Position
    first: Position
    last: Position
    rotary_start: Position

    @property
    def begin(self) -> int:
        return self.start + self.first

    @property
    def end(self) -> int:
        return self.start + self.last


class CapturedChunk(_Value):
    """Store the KV of positions [begin, end) under ``key``."""

    key: Key
    begin: Position
    end: Position


class LinkOrder(_Value):
    """How the KV of a prompt's first ``linked`` tokens comes about: ``placements``, then ``runs`` of positions to
    compute over them. vLLM computes the tokens behind them itself.

    Every one of these positions is placed or computed, so that nobody ever attends to what others left in memory.

    With ``compares`` it is not for an answer: both happen in the first layer only, and the request's ``Outcome`` tells
    how far the runs' KV deviates from that of the placements in the second.
    """

    linked: Position
    placements: tuple[PlacedChunk, ...] = ()
    runs: tuple[tuple[Position, Position], ...] = ()
    captures: tuple[CapturedChunk, ...] = ()
    compares: bool = False

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not begin < end <= self.linked for begin, end in self.runs):
            raise ValueError(f"runs {self.runs} are not ranges within the first {self.linked} tokens")
        if any(former[1] > latter[0] for former, latter in zip(self.runs, self.runs[1:], strict=False)):
            raise ValueError(f"runs {self.runs} overlap, or are not in order")
        if any(not placed.first < placed.last or placed.end > self.linked for placed in self.placements):
            raise ValueError(f"placements are not ranges within the first {self.linked} tokens")
        if any(not captured.begin < captured.end <= self.linked for captured in self.captures):
            raise ValueError(f"captures are not ranges within the first {self.linked} tokens")
        if self.compares and self.captures:
            raise ValueError("one order does not compare and capture")
        covered = 0
        for begin, end in sorted([*self.runs, *((placed.begin, placed.end) for placed in self.placements)]):
            if begin > covered:
                break
            covered = max(covered, end)
        if covered < self.linked:
            raise ValueError(f"position {covered} is neither placed nor computed")
        return self

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the chunks to place, each once."""
        return tuple(dict.fromkeys(placed.key for placed in self.placements))


class Outcome(_Value):
    """What became of an order: whether it was followed, and seconds until vLLM began with its request.

    ``deviation``: what ``KVDeviation.of_bytes`` takes, of the first ``linked`` tokens, if the order compares.
    """

    linked: bool
    queued: float = 0.0
    deviation: bytes | None = None


def order_of_params(params: Mapping[str, Any] | None, *, prompt_tokens: int) -> LinkOrder | None:
    """The order that a request with a prompt of so many tokens carries; None where it carries none.

    Raises InvalidRequestError for anything that is not a sound order for this prompt.
    """
    raw = (params or {}).get(PARAM)
    if raw is None:
        return None
    try:
        order = LinkOrder.model_validate(raw)
    except ValidationError as error:
        raise InvalidRequestError(f"kv_transfer_params.{PARAM} is not a link order: {error}", param=PARAM) from error
    if order.linked >= prompt_tokens:
        raise InvalidRequestError(
            f"kv_transfer_params.{PARAM} links {order.linked} tokens of a prompt of {prompt_tokens}; the last one is "
            "always vLLM's to compute.",
            param=PARAM,
        )
    return order


def order_of_plan(plan: LinkPlan, keys: Sequence[str]) -> LinkOrder:
    """The order for a plan; ``keys`` name the chunks of its placements. The last run, which may be the whole prompt, is
    left to vLLM."""
    linked = plan.runs[-1][0]
    return LinkOrder(linked=linked, placements=_placed(plan, keys, linked), runs=plan.runs[:-1])


def order_of_comparison(plan: LinkPlan, keys: Sequence[str], *, most: int) -> LinkOrder:
    """The order to compare what a plan computes with what it places, up to its last chunk's end, but of ``most`` tokens
    at most."""
    last_chunk = max(placement.start + placement.last for placement in plan.placements)
    linked = min(last_chunk, most)
    runs = tuple((begin, min(end, linked)) for begin, end in plan.runs if begin < linked)
    return LinkOrder(linked=linked, placements=_placed(plan, keys, linked), runs=runs, compares=True)


def _placed(plan: LinkPlan, keys: Sequence[str], linked: int) -> tuple[PlacedChunk, ...]:
    """Of the plan's placements, what lies within the first ``linked`` tokens."""
    return tuple(
        PlacedChunk(
            key=key,
            start=placement.start,
            first=placement.first,
            last=min(placement.last, linked - placement.start),
            rotary_start=placement.rotary_start,
        )
        for placement, key in zip(plan.placements, keys, strict=True)
        if placement.start + placement.first < linked
    )


def order_of_capture(key: str, *, begin: int, end: int) -> LinkOrder:
    """The order to compute the first ``end`` tokens and store the KV of those from ``begin`` on."""
    return LinkOrder(linked=end, runs=((0, end),), captures=(CapturedChunk(key=key, begin=begin, end=end),))
