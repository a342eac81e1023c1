"""An engine without a model: it says one numbered word per step, or what it is told to, when the
test lets it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

from kvlinker.base.errors import EngineClosedError, KVLinkerError, OverloadedError
from kvlinker.base.types.answers import Delta, Timing, Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import (
    EngineLoad,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
    RequestHandle,
    Sink,
)
from kvlinker.linking import Policy
from tests.waiting import PATIENCE


class FakeEngine:
    """``Engine``. Requests speak while ``flowing`` is set; more than ``capacity`` at a time are
    refused.

    A request whose turn it is to say word number ``fails_at`` fails by ``failure`` instead.
    """

    def __init__(self, *, capacity: int = 2) -> None:
        self.fingerprint = "fake"
        self.healthy = True
        self.max_model_len = 512
        self.kv_bytes_per_token = 256
        self.capacity = capacity
        self.fails_at: int | None = None
        self.failure = KVLinkerError("the model broke")
        self.script: Sequence[str] | None = None
        """The pieces of every answer, which then ends; None for numbered words without end."""
        self.flowing = threading.Event()
        self.flowing.set()
        self.cancelled = 0
        self.requests: list[GenerationRequest] = []
        self.expected: list[float] = []
        """For how long conversations are to be kept."""
        self._changed = threading.Condition()
        self._active: set[_Speaker] = set()
        self._closed = False

    def cache_chunk(self, chunk: Chunk, *, tenant: str, idle: bool = False) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(len(chunk))
        return done

    def expect_again(self, request: GenerationRequest, seconds: float) -> None:
        self.expected.append(seconds)

    def kv_bytes(self, tokens: int) -> int:
        return tokens * self.kv_bytes_per_token

    def unsupported(self, policy: Policy) -> str | None:
        return None

    def generate(self, request: GenerationRequest, sink: Sink) -> RequestHandle:
        with self._changed:
            if self._closed:
                raise EngineClosedError("closed")
            if len(self._active) + request.n > self.capacity:
                raise OverloadedError("busy", retry_after=7)
            speakers = [
                _Speaker(
                    self,
                    replace(request, n=1, sampling=request.sampling_of(choice)),
                    partial(sink, choice),
                )
                for choice in range(request.n)
            ]
            self._active.update(speakers)
            self.requests += [speaker.request for speaker in speakers]
            self._changed.notify_all()
        for speaker in speakers:
            threading.Thread(target=speaker.run, daemon=True).start()

        def cancel() -> None:
            for speaker in speakers:
                speaker.cancel()

        return RequestHandle(cancel)

    def current_load(self) -> EngineLoad:
        with self._changed:
            used = sum(len(speaker.request.prompt) for speaker in self._active)
            return EngineLoad(len(self._active), 0, used, 4096)

    def resident_keys(self) -> frozenset[str]:
        return frozenset()

    def prefill_seconds(self, tokens: int) -> float | None:
        return None

    def ended(self, speaker: _Speaker, *, cancelled: bool) -> None:
        with self._changed:
            self._active.discard(speaker)
            self.cancelled += cancelled
            self._changed.notify_all()

    def wait_until_running(self, choices: int) -> None:
        """Wait until so many choices are under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._active) >= choices, PATIENCE)

    def wait_until_idle(self) -> None:
        """Wait until no choice is under way."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._active, PATIENCE)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            active = list(self._active)
        self.flowing.set()
        for speaker in active:
            speaker.cancel()


class _Speaker:
    """One choice."""

    def __init__(
        self,
        engine: FakeEngine,
        request: GenerationRequest,
        sink: Callable[[GenerationEvent], None],
    ) -> None:
        self.request = request
        self._engine = engine
        self._sink = sink
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        said = 0
        reason = "cancelled"
        limit = self.request.sampling.max_tokens
        for number in itertools.count():
            while not (self._cancelled.is_set() or self._engine.flowing.wait(0.005)):
                pass
            if self._cancelled.is_set():
                break
            if number == self._engine.fails_at:
                self._engine.ended(self, cancelled=False)
                self._sink(Failed(self._engine.failure))
                return
            if number == limit:
                reason = "length"
                break
            script = self._engine.script
            if script is not None and number == len(script):
                reason = "stop"
                break
            self._sink(Delta(f"w{number} " if script is None else script[number], (number,)))
            said += 1
        self._engine.ended(self, cancelled=reason == "cancelled")
        usage = Usage(0, 0, len(self.request.prompt), output_tokens=said)
        self._sink(Finished(reason, usage, Timing()))
