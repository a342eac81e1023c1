"""Events for metrics and logs. Code publishes an event and does not know which listeners count
it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkLookup:
    """The store was asked for a chunk's KV; ``tier`` names where it lay, or "none" on a miss."""

    hit: bool
    tier: str


@dataclass(frozen=True, slots=True)
class ChunkLoaded:
    """A tier delivered a chunk's KV."""

    tier: str
    seconds: float
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkEvicted:
    """A tier evicted a chunk's KV to make room."""

    tier: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ChunkDamaged:
    """A tier's copy failed its checks and was dropped; the KV will be computed again."""

    tier: str
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class PrefixSpilled:
    """The KV of ``tokens`` tokens of a prefix, evicted from the engine's pool, was written to
    disk."""

    tokens: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PrefixRestored:
    """The KV of ``tokens`` tokens of a prefix was read from disk for a prompt."""

    tokens: int


@dataclass(frozen=True, slots=True)
class TierUnavailable:
    """A tier did not answer, or refused a call."""

    tier: str
    reason: str


@dataclass(frozen=True, slots=True)
class ImplicitText:
    """A text without a context cache's id was to become a chunk, for the reason ``source``."""

    source: str
    """``mark``, ``document`` or ``recognition``."""

    outcome: Literal["hit", "created", "refused"]
    """``hit``: the text had a context cache. ``created``: it got one. ``refused``: there was no
    room for one, so it stayed text."""


@dataclass(frozen=True, slots=True)
class ChunkNamed:
    """A request named a chunk, by its id or by its text, or by lines of a text that it is in (see
    ``kvlinker.base.types.residency``). Names that were published lately are not published again."""

    chunk_key: str
    names: tuple[str, ...]
    owner: str
    """The tenant whose chunk it is, or the shared one."""


@dataclass(frozen=True, slots=True)
class EvictionSwap:
    """A chunk was evicted in place of another chunk of its owner, whose next use is predicted
    sooner."""


@dataclass(frozen=True, slots=True)
class SuccessorsPredicted:
    """Predicted successors of chunks: ``followed`` of them were used next, ``others`` were not."""

    followed: int
    others: int


@dataclass(frozen=True, slots=True)
class AnswerKept:
    """An answer of the tenant was to be kept. ``kept`` is False if that failed."""

    tenant: str
    kept: bool


@dataclass(frozen=True, slots=True)
class ImplicitEvicted:
    """``count`` implicit context caches were removed to make room."""

    count: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """A request produced its first token, ``seconds`` after it was submitted."""

    seconds: float
    policy: str


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """A choice of a request ended. The prompt token counts add up to the prompt's length; they are
    zero for choices other than the first, with which the prompt is counted."""

    policy: str
    reason: str
    cached_tokens: int
    exact_cached_tokens: int
    """The part of ``cached_tokens`` that an earlier request computed in the same sequence."""

    recomputed_tokens: int
    fresh_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerAudited:
    """An answer was compared with the full computation of the same tokens."""

    policy: str

    agrees: bool
    """True if both find the same first token the most likely."""

    alike: bool
    """True if they do all along the answer."""

    kl: float | None
    """The divergence of the first token's distributions, in nats; None if it was not recorded."""

    answer_kl: float | None
    """The mean divergence along the answer, in nats; None if it was not recorded."""

    tokens: int
    """The tokens that the full computation took."""


@dataclass(frozen=True, slots=True)
class AuditSkipped:
    """A request that was drawn for the audit is not compared; ``reason`` is ``cancelled``,
    ``empty``, ``backlog``, ``budget`` or ``failed``."""

    reason: str


@dataclass(frozen=True, slots=True)
class AgreementFell:
    """Answers under a policy agree with the full computation less often than they did."""

    policy: str


Event = (
    ChunkLookup
    | ChunkLoaded
    | ChunkEvicted
    | ChunkDamaged
    | PrefixSpilled
    | PrefixRestored
    | TierUnavailable
    | ImplicitText
    | ChunkNamed
    | EvictionSwap
    | SuccessorsPredicted
    | AnswerKept
    | ImplicitEvicted
    | FirstToken
    | RequestFinished
    | AnswerAudited
    | AuditSkipped
    | AgreementFell
)
Listener = Callable[[Event], None]


class Events:
    """Delivers published events to listeners, in the publisher's thread: listeners must be
    quick."""

    def __init__(self) -> None:
        self._listeners: list[tuple[Listener, tuple[type[Event], ...]]] = []

    def subscribe(self, listener: Listener, *kinds: type[Event]) -> None:
        """Deliver events of these ``kinds`` to the listener from now on; all events where none is
        given."""
        self._listeners.append((listener, kinds))

    def publish(self, event: Event) -> None:
        """Deliver an event. A listener that fails is logged."""
        for listener, kinds in self._listeners:
            if kinds and not isinstance(event, kinds):
                continue
            try:
                listener(event)
            except Exception:
                logger.exception("A listener failed on %s.", event)
