"""Transfer plans: the KV that a request asks the connector for. They travel to vLLM's scheduler and
are checked there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.linking.plan import LinkPlan
from kvlinker.linking.policy import Needs, Policy
from kvlinker.prompting.segments import Range
from kvlinker_vllm.protocol.worker_memory import MemoryReport

PARAM = "kvlinker"
"""The transfer plan's name among a request's ``kv_transfer_params``."""

COMPARED_LAYER = 1
"""The layer in which computed KV is compared with placed KV: the first one whose KV depends on
other tokens."""

OFFERED = Needs(
    scores=True,
    sensitivity=True,
    variants=True,
    places=True,
    question_attention=True,
    layers=COMPARED_LAYER,
)
"""The needs of policies that transfer plans can follow. Variants are never stored here, so policies
are shown none."""

Measure = Literal["deviation", "attention"]
"""The measurement of a first pass, in fp32: the ``KVDeviation`` of computed from placed KV [2,
tokens], or the last token's attention on every token [layers, tokens], mean over all heads."""

_FIGURES = "<f4"

Key = Annotated[str, Field(pattern=f"^{CHUNK_KEY.pattern}$")]
Position = Annotated[int, Field(ge=0, strict=True)]


def unsupported(policy: Policy) -> str | None:
    """Return why transfer plans cannot follow the policy, and the way out; None if they can."""
    missing = policy.needs.beyond(OFFERED)
    if not missing:
        return None
    return (
        f"The policy {policy.name} needs {' and '.join(missing)}, which the vllm engine does not"
        " offer. Use a policy that decides before the answer's own pass, such as query-5,"
        " legolink-16 or cacheblend-15-onestep, or the embedded engine."
    )


class _Value(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PlacedChunk(_Value):
    """A placement of tokens [first, last) of a stored chunk: its token i goes to position ``start +
    i`` of the prompt, with the rotary embedding of position ``rotary_start + i``."""

    key: Key
    start: Position
    first: Position
    last: Position
    rotary_start: Position

    @property
    def begin(self) -> int:
        """The first position of the prompt that is placed."""
        return self.start + self.first

    @property
    def end(self) -> int:
        """The position after the last one that is placed."""
        return self.start + self.last


class CapturedChunk(_Value):
    """A chunk to store: the KV of positions [begin, end) under ``key``."""

    key: Key
    begin: Position
    end: Position


class TransferPlan(_Value):
    """The KV of a prompt's first ``linked`` tokens: ``placements``, then ``runs`` of positions
    [begin, end) to compute over them. vLLM computes the tokens after them itself.

    Every one of these positions is placed or computed, so that no token attends to KV that other
    requests left in memory.

    A plan with a ``measure`` is for a first pass, not for an answer; the ``TransferOutcome`` has
    the measurements. To measure deviation, it places and computes in the first layer only, and
    compares in the second.
    """

    linked: Position
    placements: tuple[PlacedChunk, ...] = ()
    runs: tuple[tuple[Position, Position], ...] = ()
    captures: tuple[CapturedChunk, ...] = ()
    scored: bool = True
    """False if no scores of the chunks that are captured are collected."""

    measure: Measure | None = None

    unrelated: tuple[Position, Position] | None = None
    """The positions [begin, end) of an unrelated text right before the chunk that is captured; None
    if there is none. The prompt is computed without it first, as the chunk is stored, and then
    with it, to measure the ``sensitivity`` of the chunk's tokens."""

    second_pass: bool = False
    """True if a first pass may have placed what vLLM's prefix cache holds of the prompt: runs are
    computed there, too."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the chunks to place, each once."""
        return tuple(dict.fromkeys(placed.key for placed in self.placements))

    @property
    def alone(self) -> TransferPlan | None:
        """The plan for the prompt without the unrelated text, which is carried out first; None if
        there is no such text."""
        if self.unrelated is None:
            return None
        begin, end = self.unrelated
        return plan_capture(self.captures[0].key, begin=begin, end=self.linked - (end - begin))

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(not begin < end <= self.linked for begin, end in self.runs):
            raise ValueError(
                f"runs {self.runs} are not ranges within the first {self.linked} tokens"
            )
        if any(former[1] > latter[0] for former, latter in pairwise(self.runs)):
            raise ValueError(f"runs {self.runs} overlap, or are not in order")
        if any(
            not placed.first < placed.last or placed.end > self.linked for placed in self.placements
        ):
            raise ValueError(f"placements are not ranges within the first {self.linked} tokens")
        captured = [(each.begin, each.end) for each in self.captures]
        if any(not begin < end <= self.linked for begin, end in captured):
            raise ValueError(
                f"captures {captured} are not ranges within the first {self.linked} tokens"
            )
        if self.measure and captured:
            raise ValueError("one transfer plan does not measure and capture")
        if self.unrelated is not None:
            begin, end = self.unrelated
            if not begin < end or self.placements or captured != [(end, self.linked)]:
                raise ValueError(
                    "an unrelated text stands right before a chunk that is captured, and nothing"
                    " is placed"
                )
        covered = 0
        for begin, end in sorted(
            [*self.runs, *((placed.begin, placed.end) for placed in self.placements)]
        ):
            if begin > covered:
                break
            covered = max(covered, end)
        if covered < self.linked:
            raise ValueError(f"position {covered} is neither placed nor computed")
        return self


class TransferOutcome(_Value):
    """The outcome of a transfer plan, reported with the request's output."""

    linked: bool
    """True if the plan was followed; False if vLLM computed the whole prompt."""

    queued: float = 0.0
    """The seconds until vLLM began with the request."""

    found: Position = 0
    """The tokens of the prompt's beginning whose KV vLLM still had of a request that began
    alike."""

    measured: bytes | None = None
    """The plan's measurement of the first ``linked`` tokens in bytes, if it has one."""

    memory: MemoryReport | None = None
    """The changes in workers' memory that the request's front end did not know."""


def outcome_of(params: Mapping[str, Any] | None) -> TransferOutcome | None:
    """Return the outcome that vLLM's output has among its ``kv_transfer_params``; None if it has
    none."""
    outcome = (params or {}).get(PARAM)
    return None if outcome is None else TransferOutcome.model_validate(outcome)


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """The squared L2 distances of computed and placed ``key`` and ``value``, over all heads:
    [tokens] each, 0 where nothing is placed. It is the ``Deviations`` that a ``Refinement``
    takes."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]

    def deviation(self, part: int) -> NDArray[np.float32]:
        """Return the deviation of keys (``part`` 0) or values (1): [tokens]."""
        return (self.key, self.value)[part]

    def at(self, positions: NDArray[np.int64]) -> KVDeviation:
        """Return the deviation of these tokens alone; infinite for those that were not compared."""
        missing = max(0, int(positions.max(initial=-1)) + 1 - len(self.key))
        key, value = (
            np.pad(part, (0, missing), constant_values=np.inf) for part in (self.key, self.value)
        )
        return KVDeviation(key[positions], value[positions])


def pack_figures(figures: NDArray[np.float32]) -> bytes:
    """Serialise a measurement [rows, tokens] to be sent between processes."""
    return figures.astype(_FIGURES).tobytes()


def unpack_figures(data: bytes, *, tokens: int) -> NDArray[np.float32]:
    """Read the output of ``pack_figures`` for ``tokens`` tokens: [rows, tokens]."""
    return np.frombuffer(data, _FIGURES).reshape(-1, tokens).astype(np.float32)


def plan_transfer(
    plan: LinkPlan,
    keys: Sequence[str],
    *,
    linked: int | None = None,
    measure: Measure | None = None,
    second_pass: bool = False,
) -> TransferPlan:
    """Make the transfer plan for the first ``linked`` tokens of a link plan, whose placements are
    of the chunks with these ``keys``, one each.

    By default, its last run, which may be the whole prompt, is left to vLLM.
    """
    end = plan.runs[-1][0] if linked is None else linked
    placements = tuple(
        PlacedChunk(
            key=key,
            start=placement.start,
            first=placement.first,
            last=min(placement.last, end - placement.start),
            rotary_start=placement.rotary_start,
        )
        for placement, key in zip(plan.placements, keys, strict=True)
        if placement.start + placement.first < end
    )
    runs = tuple((begin, min(last, end)) for begin, last in plan.runs if begin < end)
    return TransferPlan(
        linked=end, placements=placements, runs=runs, measure=measure, second_pass=second_pass
    )


def plan_capture(key: str, *, begin: int, end: int, unrelated: int = 0) -> TransferPlan:
    """Make the transfer plan to compute a prompt's first ``end`` tokens and store the KV from
    ``begin`` on. The last ``unrelated`` tokens before ``begin`` are an unrelated text. The stored
    KV is that without this text, with the sensitivity to it."""
    captured = CapturedChunk(key=key, begin=begin, end=end)
    text = (begin - unrelated, begin) if unrelated else None
    return TransferPlan(linked=end, runs=((0, end),), captures=(captured,), unrelated=text)


def plan_row(keys: Sequence[str], spans: Sequence[Range]) -> TransferPlan:
    """Make the transfer plan to compute a text up to its last chunk, and store the KV of chunks at
    the positions [begin, end) of ``spans``, which are in order, under these ``keys``, one each."""
    captures = tuple(
        CapturedChunk(key=key, begin=begin, end=end)
        for key, (begin, end) in zip(keys, spans, strict=True)
    )
    end = captures[-1].end
    return TransferPlan(linked=end, runs=((0, end),), captures=captures, scored=False)
