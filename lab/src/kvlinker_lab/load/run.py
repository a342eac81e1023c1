"""Puts every competitor under the same loads, one after another, each on a server of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.doors.client import Client
from kvlinker.linking import parse_policy
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.load.driver import ClosedLoop, Load, LoadRun, RequestResult, drive
from kvlinker_lab.load.endpoint import Endpoint, ServerFailedError
from kvlinker_lab.load.prompts import (
    PLAIN,
    REORDERED,
    CachedDocuments,
    DocumentForm,
    PlainDocuments,
    PrefixIndex,
)
from kvlinker_lab.load.report import ServiceObjective, load_row, with_ratios
from kvlinker_lab.load.servers import PeakMemory, Server
from kvlinker_lab.load.traffic import (
    Conversation,
    TrafficShape,
    make_conversations,
    make_library,
)

EMBEDDED = "embedded"
_CACHED_AT_ONCE = 4
"""Documents in one request for context caches."""


@dataclass(frozen=True, slots=True)
class Competitor:
    """One server with one policy, which is measured."""

    policy: str
    """A linking policy; or ``plain`` or ``reordered``, for documents as text."""
    engine: str

    @property
    def links(self) -> bool:
        """True if documents are context caches."""
        return self.policy not in (PLAIN, REORDERED)

    def __str__(self) -> str:
        return f"{self.policy} ({self.engine})"


Start = Callable[[Competitor], AbstractContextManager[Server]]
"""Starts the server of a competitor, or finds it; it may be used until the context ends."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Says which traffic every competitor gets."""

    shape: TrafficShape
    loads: Sequence[Load]
    requests: int
    """Requests of each load, made by as many whole conversations as have this many, at least
    one."""
    objective: ServiceObjective
    warm_up: int = 2
    """Conversations before the first load, one after another, which do not count."""
    patience: float = 600.0
    """Seconds after which a request is cancelled."""
    seed: int = 0

    @property
    def conversations(self) -> int:
        """Conversations of each load."""
        return -(-self.requests // self.shape.requests_per_conversation)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The rows, one per competitor and load, and the omitted competitors."""

    rows: Sequence[Row]
    warnings: Sequence[str]


def competing_policies(text: str) -> list[str]:
    """Read policies with commas between, among which ``plain`` and ``reordered`` may be. Raises
    PolicyError."""
    words = [word.strip() for word in text.split(",")]
    return list(
        dict.fromkeys(
            word if word in (PLAIN, REORDERED) else parse_policy(word).name for word in words
        )
    )


def run_load(
    competitors: Sequence[Competitor],
    start: Start,
    plan: LoadPlan,
    *,
    api_key: str | None = None,
    progress: Progress = silent,
) -> LoadReport:
    """Measure all competitors under all loads of the plan.

    The characters of a token are counted at the first server; all get the same texts. A competitor
    that cannot take part is left out with a warning. Raises InvalidRequestError if none can.
    """
    rows: list[Row] = []
    warnings: list[str] = []
    characters: float | None = None
    for competitor in competitors:
        progress(f"{competitor}: starting")
        try:
            with start(competitor) as server:
                endpoint = Endpoint.find(server.url, api_key)
                if characters is None:
                    characters = endpoint.characters_per_token()
                trial = _Trial(competitor, server, endpoint, plan, characters, progress)
                rows += trial.rows()
        except KVLinkerError as error:
            warnings.append(f"{competitor} is left out: {error.message}")
    if not rows:
        raise InvalidRequestError(" ".join(warnings) or "There is nothing to measure.")
    return LoadReport(with_ratios(rows), warnings)


@dataclass(frozen=True, slots=True)
class _Trial:
    """Measures one competitor on its server."""

    competitor: Competitor
    server: Server
    endpoint: Endpoint
    plan: LoadPlan
    characters_per_token: float
    progress: Progress

    def rows(self) -> list[Row]:
        """Cache the documents where the competitor links them, warm up, and run every load.

        Raises ServerFailedError for a server that cannot take part, and what the client raises.
        """
        plan = self.plan
        texts = make_library(plan.shape, self.characters_per_token, seed=plan.seed)
        form = self._linked(texts) if self.competitor.links else PlainDocuments(texts)
        prefixes = PrefixIndex()
        arranged = prefixes.reorder if self.competitor.policy == REORDERED else _as_it_is
        if not self.competitor.links and self.competitor.engine == EMBEDDED:
            self._require_prefix_cache(form)
        self._warm_up(
            form, [arranged(one) for one in self._conversations(plan.warm_up, seed=plan.seed + 1)]
        )
        rows = []
        for number, load in enumerate(plan.loads, start=2):
            seed = plan.seed + number
            conversations = [
                arranged(one) for one in self._conversations(plan.conversations, seed=seed)
            ]
            with PeakMemory(self.server.process) as memory:
                run = self._drive(conversations, load, form, seed=seed)
            rows.append(
                load_row(
                    self.competitor.policy,
                    self.competitor.engine,
                    load,
                    run,
                    plan.objective,
                    memory_mb=memory.megabytes,
                )
            )
        return rows

    def _conversations(self, count: int, *, seed: int) -> tuple[Conversation, ...]:
        return make_conversations(self.plan.shape, count, self.characters_per_token, seed=seed)

    def _linked(self, texts: Sequence[str]) -> CachedDocuments:
        ids: list[str] = []
        with Client(self.endpoint.url, self.endpoint.api_key) as client:
            while len(ids) < len(texts):
                self.progress(f"{self.competitor}: caching documents", len(ids), len(texts))
                some = texts[len(ids) : len(ids) + _CACHED_AT_ONCE]
                ids += [cache.id for cache in client.generate_context_cache(some)]
        return CachedDocuments(ids, self.competitor.policy)

    def _require_prefix_cache(self, form: DocumentForm) -> None:
        """Raise ServerFailedError if the server computes a prompt again that it has just
        answered."""
        (whole,) = self._conversations(1, seed=self.plan.seed)
        first = replace(whole, turns=whole.turns[:1])
        result = self._drive([first, first], ClosedLoop(1), form, seed=0).results[-1]
        if result.failure is None and result.usage is not None and not result.usage.cached_tokens:
            raise ServerFailedError(
                "the engine has no prefix cache, so that it would be measured like full."
            )

    def _warm_up(self, form: DocumentForm, conversations: Sequence[Conversation]) -> None:
        """Raise ServerFailedError if no request is answered."""
        results = self._drive(conversations, ClosedLoop(1), form, seed=0).results
        if all(result.failure is not None for result in results):
            raise ServerFailedError(_failure_of(results[0]))

    def _drive(
        self, conversations: Sequence[Conversation], load: Load, form: DocumentForm, *, seed: int
    ) -> LoadRun:
        what = f"{self.competitor}, {_load_name(load)}"
        total = sum(len(conversation.turns) for conversation in conversations)
        return drive(
            self.endpoint,
            conversations,
            load,
            form,
            patience=self.plan.patience,
            seed=seed,
            on_result=lambda done: self.progress(what, done, total),
        )


def _as_it_is(conversation: Conversation) -> Conversation:
    return conversation


def _load_name(load: Load) -> str:
    return (
        f"{load.users} users"
        if isinstance(load, ClosedLoop)
        else f"{load.rate:g} requests per second"
    )


def _failure_of(result: RequestResult) -> str:
    return f"its first request failed ({result.failure}): {result.detail}"
