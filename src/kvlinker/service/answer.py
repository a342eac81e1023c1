"""The answer of a request, put together from its events; ``LLM`` waits for one, the server for
several at once."""

from __future__ import annotations

import queue
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import (
    AnswerParts,
    AnswerPiece,
    Delta,
    PromptLogprobs,
    Timing,
    TokenLogprob,
    Usage,
)
from kvlinker.base.types.chunks import KeptAnswer, LinkedCache
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
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader

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
    """How the prompt was linked, if the request asked for it."""

    context_caches: tuple[LinkedCache, ...] = ()
    """The context caches in its prompt, those of texts that became chunks on the way included."""

    tool_calls: tuple[ToolCall, ...] = ()
    """The calls of tools that the model asks for; the text may be empty then. With
    ``finish_reason`` ``length``, the last one's arguments may be incomplete."""

    kept: KeptAnswer | None = None
    """The context cache that the answer has become, where it was to be kept."""

    reasoning: str = ""
    """The model's reasoning before its answer, if it shows any."""

    def _repr_html_(self) -> str:
        """Return the answer for a notebook, with the reuse of its prompt."""
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
            kept=finished.kept,
        )

    def read_by(self, reader: Reader) -> Self:
        """Return the answer with reasoning and calls of tools separated from its text, by a new
        reader."""
        cut = self.finish_reason != "stop"
        return self.with_pieces([*reader.feed(self.text), *reader.finish(cut=cut)])

    def with_pieces(self, pieces: Iterable[AnswerPiece]) -> Self:
        """Return the answer with the joined pieces in place of its plain text."""
        said = AnswerParts.of(pieces)
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


class AnswerBuilder:
    """Puts the answer of one choice together from its events."""

    def __init__(
        self,
        reader: Reader | None = None,
        complete: Callable[[Answer], Answer] = lambda answer: answer,
    ) -> None:
        """``reader`` separates the parts of the text; without one, all of it is content.
        ``complete`` adds to the answer what its events do not have."""
        self._reader = reader or PlainReader()
        self._complete = complete
        self._deltas: list[Delta] = []
        self._pieces: list[AnswerPiece] = []
        self._finished: Finished | None = None

    @property
    def finished(self) -> bool:
        """True once the last event was taken."""
        return self._finished is not None

    def take(self, event: GenerationEvent) -> list[AnswerPiece]:
        """Take the next event; return what it brings. Raises the error of a request that failed."""
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Delta):
            self._deltas.append(event)
            pieces = self._reader.feed(event.text)
        else:
            self._finished = event
            pieces = self._reader.finish(cut=event.reason != "stop")
        self._pieces += pieces
        return pieces

    def answer(self) -> Answer:
        """Return the answer. Raises InvalidRequestError if its last event was not taken."""
        if self._finished is None:
            raise InvalidRequestError("The stream was closed before the answer's end.")
        answer = Answer.from_events(self._deltas, self._finished)
        return self._complete(answer.with_pieces(self._pieces))


class AnswerStream(Iterator[AnswerPiece]):
    """The answer to a request, as it is generated: yields its pieces, and has the whole at the end.

    The request is cancelled by ``close``, at the end of a ``with`` block, and when the stream is
    dropped.
    """

    def __init__(
        self, submit: Callable[[ChoiceSink], RequestHandle], builder: AnswerBuilder
    ) -> None:
        """Submit a request for one choice. Raises the errors of ``submit``."""
        self._events = events = queue.SimpleQueue[GenerationEvent]()
        self._builder = builder
        self._pieces: deque[AnswerPiece] = deque()
        handle = submit(lambda _, event: events.put(event))
        self._cancel = weakref.finalize(self, handle.cancel)

    def __next__(self) -> AnswerPiece:
        """Wait for the next piece. Raises the error of a request that failed."""
        try:
            while not self._pieces:
                if self._builder.finished:
                    raise StopIteration
                event = self._events.get()
                if isinstance(event, Failed):
                    self._events.put(event)  # for who asks again: no other event comes
                self._pieces.extend(self._builder.take(event))
        except BaseException:
            self.close()
            raise
        return self._pieces.popleft()

    def texts(self) -> Iterator[str]:
        """Yield the texts of the pieces that are content."""
        return (piece.text for piece in self if piece.kind == "content")

    @property
    def answer(self) -> Answer:
        """The whole answer, once it is finished; pieces that were not taken meanwhile are skipped.
        Raises the error of a request that failed."""
        for _ in self:
            pass
        return self._builder.answer()

    def close(self) -> None:
        """Cancel the request, unless it has ended; ``answer`` then ends where it is. Idempotent."""
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
