"""Turns the tokens of a choice into events for its sink: text, stop strings, timing, and the reason
of its end. ``LoopInbox`` hands events of the engine's thread to an event loop, which is woken once
for many."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec
from weakref import WeakKeyDictionary

from tokenizers.decoders import DecodeStream

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.events import Events, FirstToken, RequestFinished
from kvlinker.base.types.answers import Delta, PromptLogprobs, Timing, TokenLogprob, Usage
from kvlinker.base.types.call_marks import CallMarks, overlap
from kvlinker.engines.contract.contract import (
    AnswerKV,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Sink,
)
from kvlinker.linking.explanation import Explanation

logger = logging.getLogger(__name__)

End = tuple[str, Delta | None]
"""The reason why an answer ends, and its last piece, if there is one."""

_TEXTS: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
"""By tokenizer, the texts of single tokens that were asked for: decoding one takes longer than
finding the token's log probability. At most one for each token of the vocabulary."""

P = ParamSpec("P")

_inboxes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, weakref.ref[LoopInbox]] = (
    weakref.WeakKeyDictionary()
)
"""Inboxes by event loop. Both sides are weak: callers of ``put`` keep an inbox alive, and its calls
may keep the loop alive."""

_making = threading.Lock()


@dataclass
class RequestClock:
    """Records when a request reaches each stage, in seconds of ``time.perf_counter``.

    All choices of a request share ``submitted``, ``loaded`` and ``started``; each has a first token
    of its own.
    """

    submitted: float = field(default_factory=time.perf_counter)

    loaded: float | None = None
    """When the KV of all its chunks was there."""

    started: float | None = None
    """When the engine began to compute its prompt."""

    def timing(self, first_token: float | None) -> Timing:
        """Return the time spent in each stage until now; ``first_token`` is the time of that token,
        None if there was none."""
        now = time.perf_counter()
        loaded = self.submitted if self.loaded is None else self.loaded
        first = now if first_token is None else first_token
        started = now if self.started is None else self.started
        started = max(loaded, min(started, first))
        return Timing(
            load=loaded - self.submitted,
            queue=started - loaded,
            link=max(first - started, 0.0),
            decode=now - first,
        )


class TextStream:
    """Decodes the tokens of one answer; ``stopped`` becomes true once a stop string has appeared.

    Text that could be the beginning of a stop string is held back until it is clear.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        *,
        min_tokens: int = 0,
        shown_tokens: Collection[int] = (),
        call_marks: CallMarks | None = None,
        skips_special: bool = True,
        shows_stop: bool = False,
    ) -> None:
        """``stop`` strings are not looked for in the text of the first ``min_tokens`` tokens, nor
        in calls of tools, which begin at ``call_marks``, None for no calls; with ``shows_stop``,
        the text ends behind the one that ends it, else before. With ``skips_special``, special
        tokens that are not ``shown_tokens`` are left out of the text."""
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._shows_stop = shows_stop
        self._skips_special = skips_special and not shown_tokens
        self._skipped = (
            _special_tokens(tokenizer).difference(shown_tokens)
            if skips_special and shown_tokens
            else frozenset[int]()
        )
        self._stream = DecodeStream(skip_special_tokens=self._skips_special)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._count = 0
        self._decoded = ""
        self._held = ""
        self._calls = call_marks
        self._calling = False
        self._may_call = False
        self._at_start = True
        self.stopped_by: str | None = None
        """The stop string that has appeared."""

    @property
    def stopped(self) -> bool:
        """True once a stop string has appeared: no more tokens are wanted."""
        return self.stopped_by is not None

    @property
    def in_call(self) -> bool:
        """True in a call, or in what is one by all that can be told so far."""
        return self._calling or self._may_call

    def push(self, token: int) -> str:
        """Add a token, and return the text that is certain now."""
        self._count += 1
        if token in self._skipped:
            return ""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += piece
        return self._release(piece)

    def finish(self) -> str:
        """Return the rest of the text, with incomplete characters as U+FFFD: no more tokens
        come."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(
            self._ids, skip_special_tokens=self._skips_special, clean_up_tokenization_spaces=False
        )
        tail = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        text = self._release(tail, is_last=True)
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str, *, is_last: bool = False) -> str:
        """Return the text that is certain now; with the last piece, no call begins any more."""
        text, self._held = self._held + piece, ""
        free = len(text)
        if self._calls is not None and not self._calling:
            end, self._calling = self._calls.free_part(text, is_start=self._at_start)
            self._may_call = not self._calls.anywhere and end < len(text)
            free = free if is_last and not self._calling else end
        elif self._calling:
            free = 0
        held = 0
        if self._count > self._min_tokens:
            before = text[:free]
            found = [(index, stop) for stop in self._stop if (index := before.find(stop)) >= 0]
            if found:
                index, self.stopped_by = min(found)
                shown = len(self.stopped_by) if self._shows_stop else 0
                return text[: index + shown]
            if not self._calling:
                held = max((overlap(before, stop) for stop in self._stop), default=0)
        certain = len(text) if self._calling else free - held
        self._held = text[certain:]
        self._at_start = self._at_start and not certain
        return text[:certain]


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the ids of the special tokens."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return frozenset(index for index, token in added.items() if token.special)


def _now(call: Callable[[], None]) -> None:
    call()


class Output:
    """Turns the tokens of one choice into events for its request's sink. One thread at a time may
    use it."""

    def __init__(
        self,
        request: GenerationRequest,
        sink: Sink,
        *,
        choice: int = 0,
        clock: RequestClock,
        tokenizer: Any,
        events: Events,
        broken: Callable[[], None],
        later: Callable[[Callable[[], None]], None] = _now,
    ) -> None:
        """``broken`` is called when the sink raises, since the caller has then gone. ``later``
        makes the calls of the sink, in order; by default at once."""
        self.tokens = 0
        """The number of generated tokens."""

        self.first_token: float | None = None
        """The time of the first token, in seconds of ``time.perf_counter``; None before."""

        self._policy = request.policy.name
        self._sink = sink
        self._choice = choice
        self._clock = clock
        self._tokenizer = tokenizer
        self._texts = _TEXTS.setdefault(tokenizer, {})
        self._events = events
        self._broken = broken
        self._later = later
        sampling = request.sampling
        self._text = TextStream(
            tokenizer,
            sampling.stop,
            min_tokens=sampling.min_tokens,
            shown_tokens=sampling.shown_tokens,
            call_marks=sampling.call_marks if sampling.stop or sampling.stop_token_ids else None,
            skips_special=sampling.skip_special_tokens,
            shows_stop=sampling.include_stop_str_in_output,
        )
        self._calls = None if request.calls is None else request.calls()
        self._shows_stop = sampling.include_stop_str_in_output
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._min_tokens = sampling.min_tokens

    def stops_at(self, token: int) -> bool:
        """Return whether the request wants its answer to end with this token, if it is next: inside
        calls of tools, none does."""
        wanted = token in self._stop_tokens and self.tokens >= self._min_tokens
        return wanted and not self._text.in_call

    def push(
        self, token: int, logprobs: tuple[TokenLogprob, ...] = (), *, ends: str | None = None
    ) -> End | None:
        """Pass on the next token, unless the answer ends with it: ``finish`` then takes what is
        returned.

        ``ends`` is ``stop`` for a token that ends the answer and is no text, and ``length`` for the
        last token that there is room for.
        """
        self.tokens += 1
        if self.first_token is None:
            self.first_token = time.perf_counter()
            self._events.publish(FirstToken(self.first_token - self._clock.submitted, self._policy))
        if ends == "stop":
            shown = self._text.push(token) if self._shows_stop else ""
            return "stop", Delta(shown + self._text.finish(), (token,), logprobs)
        text = self._text.push(token)
        if self._text.stopped or self._is_over(text):
            return "stop", Delta(text, (token,), logprobs)
        if ends == "length":
            text += self._text.finish()
            return "stop" if self._text.stopped else "length", Delta(text, (token,), logprobs)
        self._send(Delta(text, (token,), logprobs))
        return None

    def _is_over(self, text: str) -> bool:
        """Return whether the answer ends with ``text``, by the calls in it."""
        if self._calls is None:
            return False
        self._calls.feed(text)
        return self._calls.is_over

    def rest(self) -> Delta | None:
        """Return the text that was held back, where no further token will come; None if there is
        none."""
        text = self._text.finish()
        return Delta(text, ()) if text else None

    def finish(
        self,
        reason: str,
        usage: Usage,
        last: Delta | None = None,
        *,
        prompt_logprobs: PromptLogprobs | None = None,
        explanation: Explanation | None = None,
        answer_kv: AnswerKV | None = None,
    ) -> None:
        """Send the last event, after the ``last`` piece of text."""
        if last is not None:
            self._send(last)
        self._publish(reason, usage)
        timing = self._clock.timing(self.first_token)
        self._send(
            Finished(
                reason,
                usage,
                timing,
                prompt_logprobs,
                self._text.stopped_by,
                explanation,
                answer_kv,
            )
        )

    def fail(self, error: KVLinkerError) -> None:
        """Send the last event of a choice that could not be served."""
        self._publish("failed", Usage(0, 0, 0))
        self._send(Failed(error))

    def token_text(self, token: int) -> str:
        """Return the token alone, decoded."""
        text = self._texts.get(token)
        if text is None:
            text = self._texts[token] = str(self._tokenizer.decode([token]))
        return text

    def _publish(self, reason: str, usage: Usage) -> None:
        """Publish the end to listeners; the prompt, which all choices share, is counted with the
        first choice."""
        if self._choice:
            usage = Usage(0, 0, 0, usage.output_tokens)
        self._events.publish(
            RequestFinished(
                policy=self._policy,
                reason=reason,
                cached_tokens=usage.cached_tokens,
                exact_cached_tokens=usage.exact_cached_tokens,
                recomputed_tokens=usage.recomputed_tokens,
                fresh_tokens=usage.fresh_tokens,
                output_tokens=usage.output_tokens,
            )
        )

    def _send(self, event: GenerationEvent) -> None:
        self._later(partial(self._deliver, event))

    def _deliver(self, event: GenerationEvent) -> None:
        try:
            self._sink(self._choice, event)
        except Exception:
            logger.exception("The receiver of a request's events failed; the request is cancelled.")
            self._broken()


class LoopInbox:
    """Calls functions in an event loop, in the order in which they were put.

    An engine delivers tokens to many requests at once. Waking the loop takes a system call, and the
    woken loop competes with the engine's thread for Python's lock. So one wake-up serves all calls
    that are put before the loop runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[Callable[[], None]] = deque()
        self._is_woken = False

    def put(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Schedule a call of ``function`` in the loop, from any thread. A closed loop drops the
        call."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            self._calls.clear()
            return
        self._calls.append(partial(function, *args, **kwargs))
        if self._is_woken:
            return
        self._is_woken = True
        try:
            loop.call_soon_threadsafe(self._empty)
        except RuntimeError:  # it was closed meanwhile
            self._calls.clear()

    def _empty(self) -> None:
        self._is_woken = (
            False  # before the last look: a thread that puts after it wakes the loop again
        )
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:
                logger.exception("A call that was handed to the event loop failed.")


def inbox_of(loop: asyncio.AbstractEventLoop) -> LoopInbox:
    """Return the one inbox of an event loop. Any thread may call it."""
    with _making:
        known = _inboxes.get(loop)
        inbox = None if known is None else known()
        if inbox is None:
            inbox = LoopInbox(loop)
            _inboxes[loop] = weakref.ref(inbox)
        return inbox
