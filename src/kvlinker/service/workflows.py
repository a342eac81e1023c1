"""Workflows: the next uses that agents announce, and otherwise those that followed before."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    InvalidRequestError,
    shortened,
)
from kvlinker.base.events import Events, SuccessorsForetold
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, Sink
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.preloading import Preloading
from kvlinker.store import NextUses

LONGEST_WORKFLOW = 256
"""The most characters of a workflow's name."""

MOST_NODES = 256
"""The most future uses that one request may announce."""

MOST_EXPECTED = 1000
"""The most context caches that these may name together."""

MOST_STEPS = 1000
MOST_SECONDS = 3600.0
"""How far ahead a use may be announced, in requests of the workflow and in seconds."""

SOON_STEPS = 3
SOON_SECONDS = 30.0
"""Chunks that are used within so many requests or seconds are read into memory ahead."""

FIRST_PACE = 1.0
"""The seconds from one request of a workflow to the next, before any were measured."""

LONGEST_INTERVAL = 600.0
"""The most seconds between two requests that follow each other; after more, a workflow, or what a
tenant does, begins anew, and the pause says nothing of its pace."""

WEIGHT = 0.3
"""The weight of the last interval in a workflow's pace, and of the last prediction in the hit
rate."""

MOST_TENANTS = 256
MOST_LINES = 64
MOST_SETS = 1024
"""The most tenants that are known, workflows of each, and sets of chunks whose successors are; the
last used ones stay."""

LEAST_HIT_RATE = 0.5
"""The least share of foretold chunks that must follow, else they are not brought to memory."""

SHOWN = 80
"""The most characters of a value that an error shows."""

LEARNED = "\0"
"""Stands before the name of a plan that was learned: no workflow has it in its name."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class NextUse:
    """Context caches that a workflow uses in so many ``steps``, its requests from this one on, or
    ``seconds``; one of the two is None. Raises InvalidRequestError (``next``)."""

    ids: tuple[str, ...]
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None) or not self.ids:
            raise InvalidRequestError(
                "Each use of 'next' has 'ids', and either 'steps' or 'seconds'.", param="next"
            )
        for name, given, most in (
            ("steps", self.steps, MOST_STEPS),
            ("seconds", self.seconds, MOST_SECONDS),
        ):
            whole = name == "steps"
            kind = int if whole else int | float
            fits = isinstance(given, kind) and not isinstance(given, bool) and 0 <= given <= most
            if given is not None and not fits:
                raise InvalidRequestError(
                    f"'{name}' of 'next' is {shortened(repr(given), SHOWN)}, but must be from 0 to"
                    f" {most:,.0f}{', and whole' if whole else ''}.",
                    param="next",
                )

    def ahead(self, pace: float) -> float:
        """Return the seconds until then, where requests of the workflow follow each other in
        ``pace`` seconds."""
        return self.seconds if self.seconds is not None else pace * (self.steps or 0)

    @property
    def soon(self) -> bool:
        """True if it is to be in memory by now."""
        if self.steps is not None:
            return self.steps <= SOON_STEPS
        return self.seconds is not None and self.seconds <= SOON_SECONDS


@dataclass(frozen=True, slots=True)
class WorkflowStep:
    """One request of a workflow, and the context caches that the workflow uses ``next``; None if
    the request does not list them, so that the last list remains valid. Raises InvalidRequestError
    (``workflow``, ``next``)."""

    name: str
    next: tuple[NextUse, ...] | None = None

    def __post_init__(self) -> None:
        named = isinstance(self.name, str) and 0 < len(self.name) <= LONGEST_WORKFLOW
        if not named or "\0" in self.name:
            raise InvalidRequestError(
                f"A workflow's name is a text, and has 1 to {LONGEST_WORKFLOW} characters, none of"
                " them null.",
                param="workflow",
            )
        uses = self.next or ()
        ids = sum(len(use.ids) for use in uses)
        if len(uses) > MOST_NODES or ids > MOST_EXPECTED:
            raise InvalidRequestError(
                f"'next' has {len(uses):,} uses of {ids:,} context caches, but may have"
                f" {MOST_NODES:,} of {MOST_EXPECTED:,}.",
                param="link.next",
            )

    @classmethod
    def of(cls, name: str | None, following: Sequence[Mapping[str, Any]] | None) -> Self | None:
        """Parse a workflow's name and the uses to come; None without a name. Raises
        InvalidRequestError (``workflow``, ``next``)."""
        if name is None:
            if following is not None:
                raise InvalidRequestError("'next' needs a 'workflow'.", param="next")
            return None
        try:
            uses = None if following is None else tuple(map(_next_use, following))
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRequestError(
                "'next' is a list such as [{'ids': ['cc_…'], 'steps': 1}].", param="next"
            ) from error
        return cls(name, uses)


@dataclass(slots=True)
class _Line:
    """Requests that follow each other: those of a workflow, or a tenant's others."""

    pace: float = FIRST_PACE
    """The seconds from one to the next."""

    last: float | None = None
    """When the last of them began."""

    chunks: tuple[str, ...] = ()
    """Those of the last that had any, sorted."""

    foretold: tuple[str, ...] = ()
    """Those that are to follow."""

    def keep_pace(self, now: float) -> None:
        """Take note of a request that begins now."""
        if self.last is not None and now - self.last <= LONGEST_INTERVAL:
            self.pace += WEIGHT * (now - self.last - self.pace)
        self.last = now


@dataclass(slots=True)
class _Learned:
    """The sequences of a tenant's requests, and the share of recent predictions that were right."""

    successors: OrderedDict[tuple[str, ...], tuple[str, ...]] = field(default_factory=OrderedDict)
    hit_rate: float = 0.0
    lines: OrderedDict[str, _Line] = field(default_factory=OrderedDict)


class Workflows:
    """Reports the next uses of chunks to the store, and reads those that are used soon into memory.
    Methods may be called from any thread."""

    def __init__(
        self,
        caches: ContextCaches,
        next_uses: NextUses,
        preloading: Preloading,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._caches = caches
        self._next_uses = next_uses
        self._preloading = preloading
        self._events = events
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._tenants: OrderedDict[str, _Learned] = OrderedDict()

    def expected(self, step: WorkflowStep, *, tenant: str) -> list[tuple[str, NextUse]]:
        """Return the uses to come with the keys of their chunks. Raises InvalidRequestError
        (``link.next.0.ids.0``) for an id that has no context cache of the tenant."""
        uses = step.next or ()
        ids = [id for use in uses for id in use.ids]
        try:
            usable = self._caches.usable(ids, tenant=tenant)
        except (ContextCacheNotFoundError, ContextCacheModelError) as error:
            place = next(place for place, use in enumerate(uses) if error.cache_id in use.ids)
            number = uses[place].ids.index(error.cache_id)
            raise InvalidRequestError(
                error.message, param=f"link.next.{place}.ids.{number}"
            ) from error
        return [(usable[id].chunk_key, use) for use in uses for id in use.ids]

    def begin(
        self,
        step: WorkflowStep | None,
        expected: Sequence[tuple[str, NextUse]],
        used: Iterable[str],
        *,
        tenant: str,
    ) -> None:
        """Note a request that begins now and has the chunks ``used``; ``expected`` are the future
        uses that its step announces."""
        keys = tuple(dict.fromkeys(used))
        name = step.name if step else ""
        with self._lock:
            learned = self._tenants.setdefault(tenant, _Learned())
            _bound(self._tenants, tenant, MOST_TENANTS)
            line = learned.lines.setdefault(name, _Line())
            _bound(learned.lines, name, MOST_LINES)
            line.keep_pace(self._clock())
            pace = line.pace
            foretold = self._foretold(learned, line, keys)
        if step is not None:
            self._next_uses.used(tenant, name, set(keys))
        seconds: dict[str, float] = {}
        if step is not None and step.next is not None:
            for key, use in expected:
                seconds[key] = min(use.ahead(pace), seconds.get(key, MOST_SECONDS))
            self._next_uses.expect(tenant, name, seconds)
            soon = dict.fromkeys(key for key, use in expected if use.soon)
        else:
            seconds = dict.fromkeys(foretold, pace)
            soon = dict.fromkeys(foretold)
            if foretold:
                self._next_uses.expect(tenant, LEARNED + name, seconds)
        if soon:
            first = sorted(soon, key=lambda key: seconds[key])
            self._preloading.begin(first, SOON_SECONDS, tenant=tenant, replaces=True)

    def watch(self, sink: Sink) -> Sink:
        """Return a sink for the events of a workflow's request, which passes them on: its end
        leaves room for what is used next."""

        def take(choice: int, event: GenerationEvent) -> None:
            if isinstance(event, Finished | Failed):
                self._preloading.retry()
            sink(choice, event)

        return take

    def _foretold(self, learned: _Learned, line: _Line, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Take note of the chunks of a line's request, and of whether they were foretold; returns
        those that followed them before, where it pays to believe that. The lock is held."""
        if not keys:
            return ()
        if line.foretold:
            followed = len(set(line.foretold) & set(keys))
            learned.hit_rate += WEIGHT * (followed / len(line.foretold) - learned.hit_rate)
            self._events.publish(SuccessorsForetold(followed, len(line.foretold) - followed))
        if line.chunks:
            learned.successors[line.chunks] = keys
            _bound(learned.successors, line.chunks, MOST_SETS)
        line.chunks = tuple(sorted(keys))
        line.foretold = learned.successors.get(line.chunks, ())
        return line.foretold if learned.hit_rate >= LEAST_HIT_RATE else ()


def _next_use(use: Mapping[str, Any]) -> NextUse:
    """Parse one use. Raises TypeError or KeyError for what is none, and InvalidRequestError."""
    ids = use["ids"]
    if isinstance(ids, str) or not all(isinstance(each, str) for each in ids):
        raise TypeError("ids are a list of texts")
    if use.keys() - {"ids", "steps", "seconds"}:
        raise KeyError("only these three")
    return NextUse(tuple(ids), use.get("steps"), use.get("seconds"))


def _bound(table: OrderedDict[K, V], newest: K, most: int) -> None:
    """Note a use of the ``newest`` entry, and drop the oldest one of too many."""
    table.move_to_end(newest)
    if len(table) > most:
        table.popitem(last=False)
