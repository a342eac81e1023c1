"""Workflows: reports the next uses of chunks that agents announce. Where a workflow announces none,
the chunks that followed in it before are predicted."""

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
from kvlinker.base.events import Events, SuccessorsPredicted
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent, Sink
from kvlinker.service.agents.preloading import Preloading
from kvlinker.service.context_caches import ContextCaches
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
"""Chunks that are used within this many requests, or seconds, are read into memory ahead. Both were
chosen by hand."""

FIRST_PACE = 1.0
"""The seconds from one request of a workflow to the next, before any were measured."""

LONGEST_INTERVAL = 600.0
"""The most seconds between two requests that follow each other; after more, a workflow, or what a
tenant does, begins anew, and the pause says nothing of its pace."""

WEIGHT = 0.3
"""The weight of the last interval in a workflow's pace, and of the last prediction in the hit
rate."""

MOST_TENANTS = 256
MOST_WORKFLOWS = 64
MOST_SETS = 1024
"""The most tenants that are known, workflows of each, and sets of chunks whose successors are; the
last used ones stay."""

LEAST_HIT_RATE = 0.5
"""The least share of predicted chunks that must follow, else they are not brought to memory."""

SHOWN = 80
"""The most characters of a value that an error shows."""

LEARNED = "\0"
"""Stands before the name of a plan that was learned: no workflow has it in its name."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class NextUse:
    """Context caches that a workflow will use in ``steps`` requests, counted from this one, or in
    ``seconds``; one of the two is None. Raises InvalidRequestError (``next``)."""

    ids: tuple[str, ...]
    steps: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.seconds is None) or not self.ids:
            raise InvalidRequestError(
                "Each use of 'next' has 'ids', and either 'steps' or 'seconds'.", param="next"
            )
        for name, value, most in (
            ("steps", self.steps, MOST_STEPS),
            ("seconds", self.seconds, MOST_SECONDS),
        ):
            whole = name == "steps"
            kind = int if whole else int | float
            fits = isinstance(value, kind) and not isinstance(value, bool) and 0 <= value <= most
            if value is not None and not fits:
                raise InvalidRequestError(
                    f"'{name}' of 'next' is {shortened(repr(value), SHOWN)}, but must be from 0 to"
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
class _Workflow:
    """The requests of one workflow."""

    pace: float = FIRST_PACE
    """The seconds from one request to the next, smoothed."""

    last: float | None = None
    """When the last request began, by the clock."""

    chunks: tuple[str, ...] = ()
    """The chunks of its last request that had any, sorted."""

    predicted: tuple[str, ...] = ()
    """The chunks that its next request is predicted to use."""

    def keep_pace(self, now: float) -> None:
        """Take note of a request that begins now."""
        if self.last is not None and now - self.last <= LONGEST_INTERVAL:
            self.pace += WEIGHT * (now - self.last - self.pace)
        self.last = now


@dataclass(slots=True)
class _TenantHistory:
    """The sequences of a tenant's requests, and the share of recent predictions that were right."""

    successors: OrderedDict[tuple[str, ...], tuple[str, ...]] = field(default_factory=OrderedDict)
    hit_rate: float = 0.0
    workflows: OrderedDict[str, _Workflow] = field(default_factory=OrderedDict)


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
        self._tenants: OrderedDict[str, _TenantHistory] = OrderedDict()

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
        step: WorkflowStep,
        expected: Sequence[tuple[str, NextUse]],
        used: Iterable[str],
        *,
        tenant: str,
    ) -> None:
        """Note a request that begins now and has the chunks ``used``; ``expected`` are the future
        uses that its step announces."""
        keys = tuple(dict.fromkeys(used))
        name = step.name
        with self._lock:
            learned = self._tenants.setdefault(tenant, _TenantHistory())
            _bound(self._tenants, tenant, MOST_TENANTS)
            workflow = learned.workflows.setdefault(name, _Workflow())
            _bound(learned.workflows, name, MOST_WORKFLOWS)
            workflow.keep_pace(self._clock())
            pace = workflow.pace
            predicted = self._predict(learned, workflow, keys)
        self._next_uses.used(tenant, name, set(keys))
        seconds: dict[str, float] = {}
        if step.next is not None:
            for key, use in expected:
                seconds[key] = min(use.ahead(pace), seconds.get(key, MOST_SECONDS))
            self._next_uses.expect(tenant, name, seconds)
            soon = dict.fromkeys(key for key, use in expected if use.soon)
        else:
            seconds = dict.fromkeys(predicted, pace)
            soon = dict.fromkeys(predicted)
            if predicted:
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

    def _predict(
        self, learned: _TenantHistory, workflow: _Workflow, keys: tuple[str, ...]
    ) -> tuple[str, ...]:
        """Note the chunks of a workflow's request, and whether they were predicted. Returns those
        that followed them before, if enough predictions were right. The lock is held."""
        if not keys:
            return ()
        if workflow.predicted:
            followed = len(set(workflow.predicted) & set(keys))
            learned.hit_rate += WEIGHT * (followed / len(workflow.predicted) - learned.hit_rate)
            self._events.publish(SuccessorsPredicted(followed, len(workflow.predicted) - followed))
        if workflow.chunks:
            learned.successors[workflow.chunks] = keys
            _bound(learned.successors, workflow.chunks, MOST_SETS)
        workflow.chunks = tuple(sorted(keys))
        workflow.predicted = learned.successors.get(workflow.chunks, ())
        return workflow.predicted if learned.hit_rate >= LEAST_HIT_RATE else ()


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
