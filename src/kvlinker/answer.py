"""Answers from an engine: several choices at once as they come, or one that is waited for."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvlinker.engine.contract import Engine, Failed, GenerationEvent, GenerationRequest, RequestHandle
from kvlinker.types.answers import Delta, Finished, Timing, TokenLogprob, Usage

ChoiceSink = Callable[[int, GenerationEvent], None]
"""Takes the index of a choice (0 to n-1) and its next event."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request came to."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] = ()


def submit_choices(engine: Engine, request: GenerationRequest, n: int, sink: ChoiceSink) -> tuple[RequestHandle, ...]:
    """Queue ``n`` choices for one request and return at once; events come from the engine's thread.

    With a seed, choice i uses seed + i. When one choice cannot be queued, none is. Raises what ``Engine.generate``
    does.
    """
    handles: list[RequestHandle] = []
    try:
        for index in range(n):
            seed = None if request.sampling.seed is None else request.sampling.seed + index
            choice = replace(request, sampling=replace(request.sampling, seed=seed))
            handles.append(engine.generate(choice, partial(sink, index)))
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
    return tuple(handles)


def wait_for_answer(engine: Engine, request: GenerationRequest) -> Answer:
    """The whole answer. Raises what ``Engine.generate`` does, and the error of a request that failed."""
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    handle = engine.generate(request, events.put)
    deltas: list[Delta] = []
    try:
        while isinstance(event := events.get(), Delta):
            deltas.append(event)
    except BaseException:
        handle.cancel()
        raise
    if isinstance(event, Failed):
        raise event.error
    return _collect(deltas, event)


def _collect(deltas: Sequence[Delta], finished: Finished) -> Answer:
    return Answer(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        finish_reason=finished.reason,
        usage=finished.usage,
        timing=finished.timing,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )
