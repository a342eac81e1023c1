"""Learns how long tools take, and keeps the KV of conversations that wait for one for as long."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from kvlinker.base.types.answers import AnswerParts, Delta
from kvlinker.engines.contract.contract import (
    Engine,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Sink,
)
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.segments import Prompt

FIRST_SECONDS = 5.0
"""The seconds that a tool is expected to take, before any of its calls came back."""

MOST_TOOLS = 1024
"""The most tools, of all tenants, whose times are remembered."""

MOST_WAITING = 1024
"""The most conversations that wait for a tool, and are known to."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ToolTime:
    """How long a tool takes, smoothed as TCP smooths round trips (RFC 6298)."""

    mean: float
    deviation: float

    def note(self, seconds: float) -> None:
        """Take note of one more call."""
        self.deviation += (abs(seconds - self.mean) - self.deviation) / 4
        self.mean += (seconds - self.mean) / 8

    @property
    def longest(self) -> float:
        """The seconds within which almost all calls come back."""
        return self.mean + 4 * self.deviation


class _WaitingTurn(NamedTuple):
    """A conversation whose tools are out."""

    tools: tuple[str, ...]
    since: float


class ToolWaits:
    """Watches answers that call tools. Methods may be called from any thread."""

    def __init__(
        self, engine: Engine, *, longest: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``longest``: the most seconds that a conversation is kept for its tools."""
        self._engine = engine
        self._longest = longest
        self._clock = clock
        self._lock = threading.Lock()  # guards everything below
        self._times: OrderedDict[tuple[str, str], ToolTime] = OrderedDict()
        self._waiting: OrderedDict[tuple[str, int, bytes], _WaitingTurn] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvlinker-tools")

    def watch(self, request: GenerationRequest, sink: Sink, reader: Callable[[], Reader]) -> Sink:
        """Return a sink for the events of a request whose answers may call tools, which passes them
        on; ``reader`` makes readers of the first answer's calls."""
        texts: list[str] = []
        self._learn_times(request)

        def take(choice: int, event: GenerationEvent) -> None:
            if choice == 0 and isinstance(event, Delta):
                texts.append(event.text)
            sink(choice, event)
            if choice == 0 and isinstance(event, Finished) and event.reason == "stop":
                self._thread.submit(self._keep, request, "".join(texts), reader())

        return take

    def expected(self, tenant: str, tool: str) -> float:
        """Return the seconds for which a conversation is kept while this tool is out."""
        with self._lock:
            known = self._times.get((tenant, tool))
        return min(self._longest, FIRST_SECONDS if known is None else known.longest)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self._thread.shutdown()

    def _keep(self, request: GenerationRequest, text: str, reader: Reader) -> None:
        """Keep the conversation if its answer called tools."""
        try:
            said = AnswerParts.of([*reader.feed(text), *reader.finish(cut=False)])
            tools = tuple(dict.fromkeys(call.name for call in said.calls))
            if not tools:
                return
            (name,) = _names(request.sharer, request.prompt, [len(request.prompt)])
            with self._lock:
                self._waiting[name] = _WaitingTurn(tools, self._clock())
                if len(self._waiting) > MOST_WAITING:
                    self._waiting.popitem(last=False)
            seconds = max(self.expected(request.tenant, tool) for tool in tools)
            if seconds:
                self._engine.expect_again(request, seconds)
        except Exception:
            logger.exception("A conversation is not kept for its tools")

    def _learn_times(self, request: GenerationRequest) -> None:
        """Learn from a request that goes on where tools were out. What took longer than anything is
        kept counts as that long, so that one call does not outweigh many."""
        now = self._clock()
        with self._lock:
            lengths = {
                length
                for sharer, length, _ in self._waiting
                if sharer == request.sharer and length < len(request.prompt)
            }
        names = _names(request.sharer, request.prompt, sorted(lengths))
        with self._lock:
            for name in reversed(names):
                turn = self._waiting.pop(name, None)
                if turn is None:
                    continue
                for tool in turn.tools:
                    key = request.tenant, tool
                    seconds = min(now - turn.since, self._longest)
                    if key in self._times:
                        self._times[key].note(seconds)
                    else:
                        self._times[key] = ToolTime(seconds, seconds / 2)
                    self._times.move_to_end(key)
                    if len(self._times) > MOST_TOOLS:
                        self._times.popitem(last=False)
                return


def _names(sharer: str, prompt: Prompt, lengths: Sequence[int]) -> list[tuple[str, int, bytes]]:
    """Return a name for each beginning of a prompt that ``sharer``'s requests may share, by its
    length in tokens; ``lengths`` ascend."""
    names, digest, read = [], sha256(), 0
    for length in lengths:
        digest.update(prompt.tokens[read:length].tobytes())
        read = length
        names.append((sharer, length, digest.digest()))
    return names
