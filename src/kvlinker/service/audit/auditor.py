"""Draws a share of requests, and compares each one's answer with the full computation, once it is
complete."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from kvlinker.base.errors import EngineClosedError
from kvlinker.base.events import AnswerAudited, AuditSkipped, Events
from kvlinker.base.types.answers import Delta, TokenLogprob, Usage
from kvlinker.engines.contract.contract import (
    Engine,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Sink,
)
from kvlinker.service.audit.comparison import NextToken, RequestKind, ServedAnswer, compare
from kvlinker.service.audit.figures import AuditFigures
from kvlinker.service.audit.findings import Findings, Sample
from kvlinker.service.audit.journal import AuditJournal
from kvlinker.service.audit.pool import AuditPool

logger = logging.getLogger(__name__)

TOP = 20
"""The most likely tokens of each distribution that are compared; all others count as one. The
divergence is a lower bound for larger vocabularies."""

MOST_PENDING = 128
"""The most answers that wait to be compared; further ones are not."""

HOUR = 3600.0

Skip = Literal["cancelled", "empty", "backlog", "budget", "failed"]
"""The reason why a drawn request is not compared."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    """Says how much is audited."""

    share: float
    """The share, from 0 to 1, of requests that are drawn among those with chunks."""

    tokens_per_hour: int | None = None
    """The most tokens that the full computations may take in an hour; None for no limit."""


class TokenBudget:
    """Allows a number of tokens an hour; unused time is kept for later, an hour's worth at most."""

    def __init__(
        self, per_hour: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._per_hour = per_hour
        self._clock = clock
        self._left = float(per_hour or 0)
        self._since = clock()

    def take(self, tokens: int) -> bool:
        """Take this many tokens. Returns False, and takes nothing, where fewer are left."""
        if self._per_hour is None:
            return True
        now = self._clock()
        self._left = min(
            self._left + self._per_hour * (now - self._since) / HOUR, float(self._per_hour)
        )
        self._since = now
        if tokens > self._left:
            return False
        self._left -= tokens
        return True


class Auditor:
    """Watches requests and compares those that are drawn. All methods may be called from any
    thread.

    An answer is recorded as it is given. The full computation waits until the engine has nothing
    else to do (``Engine.score_whole``); one is under way at a time. An answer under a policy that
    computes everything agrees without being computed again.
    """

    def __init__(
        self,
        engine: Engine,
        events: Events,
        options: AuditOptions,
        findings: Findings,
        *,
        journal: AuditJournal | None = None,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``findings`` take each answer, exact ones included, unless ``pool`` is set, which gives
        them those of other servers, too. ``journal`` gets a line for each compared one. ``draw``
        gives numbers from 0 to 1 that decide who is drawn."""
        self.pool: AuditPool | None = None
        self._findings = findings
        self.options = options
        self._engine = engine
        self._events = events
        self._journal = journal
        self._draw = draw
        self._budget = TokenBudget(options.tokens_per_hour)
        self._skipped: Counter[Skip] = Counter()
        self._answers: queue.Queue[ServedAnswer | None] = queue.Queue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvlinker-audit", daemon=True)
        self._thread.start()

    @property
    def figures(self) -> AuditFigures:
        """The figures since the audit began."""
        return self._findings.figures

    @property
    def pending(self) -> int:
        """The number of answers that wait to be compared, or are being compared."""
        return self._answers.unfinished_tasks

    @property
    def skipped(self) -> dict[Skip, int]:
        """The number of drawn requests that were not compared, by reason."""
        return dict(sorted(self._skipped.items()))

    def watch(
        self, request: GenerationRequest, sink: Sink, *, implicit: bool = False
    ) -> tuple[GenerationRequest, Sink]:
        """Return the request and the sink to give to the engine in the places of these, which are
        others only if the request is drawn. The sink given gets the same events either way.
        ``implicit``: none of its chunks was named by id."""
        sampling = request.sampling
        if (
            not request.prompt.spans
            or sampling.max_tokens == 0
            or self._draw() >= self.options.share
        ):
            return request, sink
        if request.policy.exact and self._findings.controller is None:
            return request, sink
        if request.policy.exact:
            return request, self._noting_agreement(request, sink, implicit=implicit)
        recorder = _Recorder(request, sink, self._take, implicit=implicit)
        return replace(
            request, sampling=replace(sampling, logprobs=max(sampling.logprobs or 0, TOP))
        ), recorder

    def _noting_agreement(self, request: GenerationRequest, sink: Sink, *, implicit: bool) -> Sink:
        """Return a sink that also notes that the answer agrees, once it is given."""
        kind = RequestKind.of(request.prompt, implicit=implicit)

        def noting(choice: int, event: GenerationEvent) -> None:
            if choice == 0 and isinstance(event, Finished) and event.reason != "cancelled":
                self._note(Sample(time.time(), request.tenant, request.policy.name, kind, None))
            sink(choice, event)

        return noting

    def wait(self, seconds: float) -> bool:
        """Wait until all answers so far are compared; False if that takes longer."""
        deadline = time.monotonic() + seconds
        with self._answers.all_tasks_done:
            while self._answers.unfinished_tasks:
                seconds = deadline - time.monotonic()
                if seconds <= 0 or not self._answers.all_tasks_done.wait(seconds):
                    return False
        return True

    def close(self) -> None:
        """Stop comparing; close the engine before, so that running comparisons end. Idempotent."""
        self._closed = True
        self._answers.put(None)
        self._thread.join()

    def _take(self, answer: ServedAnswer | None) -> None:
        """Take the answer of a drawn request; None if it was cancelled or failed. Called by the
        engine's thread."""
        if answer is None:
            self._skip("cancelled")
        elif not answer.comparable:
            self._skip("empty")
        elif self.pending >= MOST_PENDING:
            self._skip("backlog")
        elif not self._budget.take(len(answer.prompt) + len(answer.token_ids)):
            self._skip("budget")
        else:
            self._answers.put(answer)

    def _skip(self, reason: Skip) -> None:
        self._skipped[reason] += 1
        self._events.publish(AuditSkipped(reason))

    def _note(self, sample: Sample) -> None:
        if self.pool is None:
            self._findings.take(sample)
        else:
            self.pool.add(sample)

    def _run(self) -> None:
        while (answer := self._answers.get()) is not None:
            try:
                if not self._closed:
                    self._compare(answer)
            except EngineClosedError:
                pass
            except Exception:
                logger.exception("An answer could not be compared with the full computation.")
                self._skip("failed")
            finally:
                self._answers.task_done()

    def _compare(self, answer: ServedAnswer) -> None:
        scoring = self._engine.score_whole(
            answer.sequence, first=len(answer.prompt), top=TOP, tenant=answer.tenant
        )
        found = compare(answer, scoring.result())
        sample = Sample(time.time(), answer.tenant, answer.policy, answer.kind, found)
        self._note(sample)
        if self.pool is not None:
            self.pool.refresh()
        self._events.publish(
            AnswerAudited(
                self.figures.name(answer.policy),
                agrees=found.agrees,
                alike=found.alike,
                kl=found.kl,
                answer_kl=found.answer_kl,
                tokens=len(answer.prompt) + len(answer.token_ids),
            )
        )
        if self._journal is not None:
            try:
                self._journal.write(answer, found)
            except OSError as error:
                logger.warning("A compared answer is missing in audit_log: %s.", error)


class _Recorder:
    """A ``Sink`` that passes on the events of its request, and records the first choice."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        take: Callable[[ServedAnswer | None], object],
        *,
        implicit: bool,
    ) -> None:
        self._request = request
        self._sink = sink
        self._take = take
        self._implicit = implicit
        self._token_ids: list[int] = []
        self._next_tokens: list[NextToken] = []

    def __call__(self, choice: int, event: GenerationEvent) -> None:
        if choice == 0:
            self._record(event)
        if isinstance(event, Delta):
            event = replace(event, logprobs=self._wanted(event.logprobs))
        self._sink(choice, event)

    def _wanted(self, entries: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
        """Return as much of the log probabilities as the request asked for."""
        count = self._request.sampling.logprobs
        return (
            ()
            if count is None
            else tuple(replace(entry, top=entry.top[:count]) for entry in entries)
        )

    def _record(self, event: GenerationEvent) -> None:
        if isinstance(event, Delta):
            self._token_ids += event.token_ids
            self._next_tokens += [NextToken.of(entry.top) for entry in event.logprobs]
        elif isinstance(event, Finished) and event.reason != "cancelled":
            self._take(self._answer(event.usage))
        else:
            self._take(None)

    def _answer(self, usage: Usage) -> ServedAnswer:
        request = self._request
        return ServedAnswer(
            request.prompt,
            request.policy.name,
            request.tenant,
            RequestKind.of(request.prompt, implicit=self._implicit),
            greedy=request.sampling.takes_the_most_likely,
            token_ids=tuple(self._token_ids),
            next_tokens=tuple(self._next_tokens),
            usage=usage,
        )
