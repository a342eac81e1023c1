"""The answer of a request, put together from its events; ``LLM`` waits for one, the server for
several at once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvlinker.base.types.answers import (
    AnswerParts,
    Delta,
    PromptLogprobs,
    Timing,
    TokenLogprob,
    Usage,
)
from kvlinker.base.types.context_cache import LinkedCache
from kvlinker.base.types.tools import ToolCall
from kvlinker.engines.contract.contract import (
    Failed,
    Finished,
    GenerationEvent,
    RequestHandle,
    Sink,
)
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.notebook import text_html, usage_html
from kvlinker.prompting.answer_forms.reader import Reader

ChoiceSink = Sink


@dataclass(frozen=True, slots=True)
class Answer:
    """Holds the whole output of one choice; ``finish_reason`` is ``stop``, ``tool_calls``,
    ``length`` or ``cancelled``."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None

    explanation: Explanation | None = None
    """How the prompt was linked, where that was asked for."""

    context_caches: tuple[LinkedCache, ...] = ()
    """The context caches in its prompt, those of texts that became chunks on the way included."""

    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of tools that the model asks for; the text may be empty then. With
    ``finish_reason`` ``length``, the last one's arguments may be incomplete."""

    reasoning: str = ""
    """What the model thought before it answered a conversation, where it tells that."""

    def _repr_html_(self) -> str:
        """Return the answer for a notebook, with what its prompt reused."""
        said = [self.text, *(f"{call.name}({call.arguments})" for call in self.tool_calls)]
        prompt = self.explanation._repr_html_() if self.explanation else None
        return text_html("\n".join(filter(None, said))) + usage_html(self.usage) + (prompt or "")

    @classmethod
    def from_events(cls, deltas: Sequence[Delta], finished: Finished) -> Self:
        """Join the output of a choice that is finished."""
        return cls(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(token for delta in deltas for token in delta.token_ids),
            finish_reason=finished.reason,
            usage=finished.usage,
            timing=finished.timing,
            logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
            prompt_logprobs=finished.prompt_logprobs,
            explanation=finished.explanation,
        )

    def read_by(self, reader: Reader) -> Self:
        """Return the answer with reasoning and calls of tools told apart from its text, by a reader
        that read nothing yet."""
        cut = self.finish_reason != "stop"
        said = AnswerParts.of([*reader.feed(self.text), *reader.finish(cut=cut)])
        return replace(
            self,
            text=said.content,
            reasoning=said.reasoning,
            tool_calls=said.calls,
            finish_reason=finish_reason(self.finish_reason, called=said.calls_complete),
        )


def finish_reason(reason: str, *, called: bool) -> str:
    """Return why an answer ended, as OpenAI's API says it; ``called``: it has calls of tools, and
    the last one is complete."""
    return "tool_calls" if called and reason == "stop" else reason


def wait_for_answer(submit: Callable[[ChoiceSink], RequestHandle]) -> Answer:
    """Submit a request for one choice and block until it is finished; the request is cancelled when
    waiting ends early.

    Raises what ``submit`` raises, and the error of a request that failed.
    """
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    handle = submit(lambda _, event: events.put(event))
    deltas: list[Delta] = []
    try:
        while isinstance(event := events.get(), Delta):
            deltas.append(event)
    except BaseException:
        handle.cancel()
        raise
    if isinstance(event, Failed):
        raise event.error
    return Answer.from_events(deltas, event)
