"""A request's output on its way to its sink: text from tokens, stop strings, events, and how it ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvlinker.engine.contract import Failed, GenerationEvent, GenerationRequest, Sink
from kvlinker.errors import KVLinkerError
from kvlinker.events import Events, FirstToken, RequestFinished
from kvlinker.types.answers import Delta, Finished, Timing, TokenLogprob, Usage


class TextStream:
    """Decodes one request's output; ``stopped`` once a stop string has appeared.

    Text that could be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += piece
        return self._release(piece)

    def finish(self) -> str:
        """No more tokens come: the rest of the text, incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        tail = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        text = self._release(tail)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


logger = logging.getLogger(__name__)

End = tuple[str, Delta]
"""Why an answer ends, and its last piece."""


class Output:
    """Tokens in, events out; one thread at a time. ``tokens`` counts them, ``first_token`` is when the first came."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        tokenizer: Any,
        events: Events,
        broken: Callable[[], None],
    ) -> None:
        """``broken`` is told when the sink raises: nobody listens any more."""
        self.tokens = 0
        self.first_token: float | None = None
        self._policy = request.policy.name
        self._sink = sink
        self._tokenizer = tokenizer
        self._events = events
        self._broken = broken
        self._text = TextStream(tokenizer, request.sampling.stop)
        self._submitted = time.perf_counter()

    def push(self, token: int, logprobs: tuple[TokenLogprob, ...] = (), *, ends: str | None = None) -> End | None:
        """Pass on the next token, unless the answer ends with it: then ``finish`` is to be told what is returned.

        ``ends``: ``stop`` for a token that says so, and is no text; ``length`` for the last one that there is room for.
        """
        self.tokens += 1
        if self.first_token is None:
            self.first_token = time.perf_counter()
            self._events.publish(FirstToken(self.first_token - self._submitted, self._policy))
        if ends == "stop":
            return "stop", Delta(self._text.finish(), (token,))
        text = self._text.push(token)
        if self._text.stopped:
            return "stop", Delta(text, (token,), logprobs)
        if ends == "length":
            text += self._text.finish()
            return "stop" if self._text.stopped else "length", Delta(text, (token,), logprobs)
        self._send(Delta(text, (token,), logprobs))
        return None

    def rest(self) -> Delta | None:
        """Text that was held back, where no further token will come."""
        text = self._text.finish()
        return Delta(text, ()) if text else None

    def finish(self, reason: str, usage: Usage, timing: Callable[[], Timing], last: Delta | None = None) -> None:
        """The end, behind ``last``."""
        if last is not None:
            self._send(last)
        self._publish(reason, usage)
        self._send(Finished(reason, usage, timing()))

    def fail(self, error: KVLinkerError) -> None:
        """The end of a request that could not be served."""
        self._publish("failed", Usage(0, 0, 0))
        self._send(Failed(error))

    def token_text(self, token: int) -> str:
        """The token alone, decoded."""
        text: str = self._tokenizer.decode([token])
        return text

    def _publish(self, reason: str, usage: Usage) -> None:
        self._events.publish(
            RequestFinished(
                policy=self._policy,
                reason=reason,
                cached_tokens=usage.cached_tokens,
                recomputed_tokens=usage.recomputed_tokens,
                fresh_tokens=usage.fresh_tokens,
                output_tokens=usage.output_tokens,
            )
        )

    def _send(self, event: GenerationEvent) -> None:
        try:
            self._sink(event)
        except Exception:
            logger.exception("The receiver of a request's events failed; the request is cancelled.")
            self._broken()
