"""Sends requests of all kinds, by many clients at the same time, and counts their outcomes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import numpy as np

from kvlinker.base.errors import ContextCacheNotFoundError, KVLinkerError
from kvlinker.doors.client import AsyncClient
from kvlinker.engines.contract.contract import engine_closed
from kvlinker_lab.load.driver import (
    BROKEN_OFF,
    CONNECTION,
    ERROR,
    NOT_SENT,
    UNFINISHED,
    Driver,
    RequestResult,
)
from kvlinker_lab.load.endpoint import Endpoint
from kvlinker_lab.load.prompts import (
    CachedDocuments,
    DocumentForm,
    MarkedDocuments,
    PlainDocuments,
)
from kvlinker_lab.load.traffic import Conversation, make_conversations
from kvlinker_lab.soak.library import Library
from kvlinker_lab.soak.plan import SoakPlan
from kvlinker_lab.soak.retrying import retry

PATIENCE = 300.0
"""Seconds after which a request counts as failed."""
VISIT_SECONDS = 1.0
"""Seconds between two rounds of requests that generate nothing."""
_FORMS = (0.6, 0.2, 0.2)
"""How often documents are context caches, marked texts, and plain texts."""


@dataclass(slots=True)
class Tally:
    """The counts of requests and of their outcomes."""

    complete: int = 0
    """Complete answers."""
    aborted: int = 0
    """Requests whose client left on purpose."""
    not_found: int = 0
    """Requests that were refused, for they asked for deleted content."""
    cut: int = 0
    """Requests that a stopping server cut off, since they took longer than its
    ``drain_timeout``."""
    lost: int = 0
    """Requests whose connection broke before their answer was complete; these are failures, too."""
    refused: int = 0
    """Refusals of requests that generate nothing, by a server that was being restarted; they were
    sent again."""
    replaced: int = 0
    """Documents that were replaced by others."""
    visits: int = 0
    """Rounds of requests that generate nothing."""
    prompt_tokens: int = 0
    """Tokens of the prompts of complete answers."""
    cached_tokens: int = 0
    """Prompt tokens of complete answers whose KV was kept."""
    recomputed_tokens: int = 0
    """Prompt tokens of complete answers that were computed again."""
    output_tokens: int = 0
    """Tokens of complete answers."""
    failures: Counter[str] = field(default_factory=Counter)
    """All other failures, by their messages."""

    def add(self, result: RequestResult, *, aborts: bool, deleted: bool) -> None:
        """Count the outcome of a request. ``aborts``: its client had to disconnect early;
        ``deleted``: it asked for deleted content."""
        if result.failure is None and result.usage is not None:
            self.complete += 1
            self.prompt_tokens += result.usage.prompt_tokens
            self.cached_tokens += result.usage.cached_tokens or 0
            self.recomputed_tokens += result.usage.recomputed_tokens or 0
            self.output_tokens += result.output_tokens
        elif result.failure == UNFINISHED and aborts:
            self.aborted += 1
        elif result.failure == "status 404" and deleted:
            self.not_found += 1
        elif result.failure == ERROR and result.detail == engine_closed().message:
            self.cut += 1
        elif result.failure != NOT_SENT:
            self.lost += result.failure in (CONNECTION, BROKEN_OFF)
            self.failures[f"{result.failure or 'no usage'}: {result.detail}"] += 1


class Clients:
    """Sends the traffic of a plan to a server, from one event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        http: httpx.AsyncClient,
        client: AsyncClient,
        library: Library,
        plan: SoakPlan,
        *,
        characters_per_token: float,
    ) -> None:
        """``http`` sends requests for answers, and ``client`` all others."""
        self.tally = Tally()
        self._model = endpoint.model
        self._http = http
        self._client = client
        self._library = library
        self._plan = plan
        self._characters = characters_per_token
        self._clock = asyncio.get_running_loop().time
        self._begun = 0
        self._usual_seconds = 1.0

    async def send_mixed(self, seconds: float) -> None:
        """Converse, abort, replace documents and visit other routes for ``seconds``, until all is
        answered."""
        end = self._clock() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.users):
                tasks.create_task(self._until(end, self._converse_or_leave, 0.0))
            if self._plan.uploads:
                tasks.create_task(self._until(end, self._replace, 1 / self._plan.uploads))
            tasks.create_task(self._until(end, self._visit, VISIT_SECONDS))

    async def send_calm(self, conversations: int) -> Tally:
        """Hold ``conversations``, by ``users`` at the same time, with no aborts and no changes of
        documents, and return their tally. Failures count in ``self.tally``, too."""
        before, self.tally = self.tally, Tally()
        waiting = iter(range(conversations))

        async def user() -> None:
            for _ in waiting:
                await self._converse(self._next_generator(), PATIENCE, aborts=False)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._plan.users):
                tasks.create_task(user())
        calm, self.tally = self.tally, before
        self.tally.failures += calm.failures
        return calm

    async def _until(self, end: float, act: Callable[[], Awaitable[None]], pause: float) -> None:
        """Call ``act`` again and again until ``end``, with pauses of ``pause`` seconds. Failures
        are counted."""
        while (now := self._clock()) < end:
            try:
                self.tally.refused += await retry(act)
            except KVLinkerError as error:
                self.tally.failures[f"{act.__name__.strip('_')}: {error.message}"] += 1
            await asyncio.sleep(min(pause, max(end - now, 0.0)))

    async def _converse_or_leave(self) -> None:
        """Hold a conversation, or leave it after up to twice the time that a request usually
        takes."""
        generator = self._next_generator()
        aborts = bool(generator.random() < self._plan.aborts)
        patience = float(generator.uniform(0, 2 * self._usual_seconds)) if aborts else PATIENCE
        await self._converse(generator, patience, aborts=aborts)

    async def _converse(
        self, generator: np.random.Generator, patience: float, *, aborts: bool
    ) -> None:
        shapes = self._plan.shapes
        shape = shapes[int(generator.integers(len(shapes)))]
        (conversation,) = make_conversations(
            shape, 1, self._characters, seed=int(generator.integers(2**32))
        )
        form = self._form(generator)
        driver = Driver(self._http, self._model, form, patience)
        await driver.converse(conversation, due=self._clock())
        for result in driver.results:
            self.tally.add(result, aborts=aborts, deleted=self._was_deleted(conversation, form))
            if result.failure is None:
                self._usual_seconds += 0.1 * (result.ended - self._usual_seconds)

    def _form(self, generator: np.random.Generator) -> DocumentForm:
        """Choose how documents stand in a conversation, with the documents as they are now."""
        policy = self._plan.policies[int(generator.integers(len(self._plan.policies)))]
        texts = tuple(self._library.texts)
        forms = (
            CachedDocuments(tuple(self._library.ids), policy),
            MarkedDocuments(texts, policy),
            PlainDocuments(texts),
        )
        return forms[generator.choice(len(forms), p=_FORMS)]

    def _was_deleted(self, conversation: Conversation, form: DocumentForm) -> bool:
        """Return whether one of a conversation's documents was deleted meanwhile, or may have
        expired."""
        if not isinstance(form, CachedDocuments):
            return False
        documents = {
            *conversation.preamble,
            *(one for turn in conversation.turns for one in turn.documents),
        }
        return any(form.ids[document] in self._library.gone for document in documents)

    async def _replace(self) -> None:
        if (wrong := await self._library.replace()) is not None:
            self.tally.failures[wrong] += 1
        self.tally.replaced += 1

    async def _visit(self) -> None:
        """Ask for everything that generates nothing."""
        cache_id = self._library.ids[0]
        try:
            await self._client.read_cache(cache_id)
            await self._client.explain(
                [{"role": "user", "content": [{"type": "context_cache", "id": cache_id}, "?"]}]
            )
        except ContextCacheNotFoundError:
            if cache_id not in self._library.gone:
                raise
        await self._client.search(self._library.texts[-1][:20])
        await self._client.list_caches()
        await self._client.caches_usage()
        await self._client.server_status()
        self.tally.visits += 1

    def _next_generator(self) -> np.random.Generator:
        """Make the source of chance for another conversation."""
        self._begun += 1
        return np.random.default_rng([self._plan.seed, 1, self._begun])
