"""Measures times to the first token of prompts of cached chunks, competitors in turn, and a machine's limits."""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvlinker.engine.contract import Engine, Failed, GenerationEvent, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompt.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.research.progress import Progress, silent
from kvlinker.types.answers import Finished, Timing
from kvlinker.types.chunks import Chunk
from kvlinker.types.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

TENANT = "bench"
"""The tenant whose chunks benchmarks cache."""

Key = TypeVar("Key", bound=Hashable)
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a prompt of cached chunks with fresh tokens behind them, all of random token ids."""

    chunks: int
    chunk_tokens: int
    fresh_tokens: int

    @property
    def tokens(self) -> int:
        """The length of the prompt."""
        return self.chunks * self.chunk_tokens + self.fresh_tokens

    def prompt(self, vocabulary: int, seed: int = 0) -> Prompt:
        """Make the prompt of ids below ``vocabulary``; equal seeds make equal prompts."""
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(generator.integers(0, vocabulary, count).tolist())

        cached = [CachedSegment(Chunk(tokens(self.chunk_tokens))) for _ in range(self.chunks)]
        return Prompt((*cached, FreshSegment(tokens(self.fresh_tokens))))


def greedy_request(prompt: Prompt, policy: str, *, max_tokens: int = 1) -> GenerationRequest:
    """Make a request for exactly ``max_tokens`` tokens, sampled greedily."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerationRequest(prompt, parse_policy(policy), sampling, TENANT)


def cache_chunks(engine: Engine, prompt: Prompt) -> None:
    """Compute the KV of all chunks of the prompt."""
    for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
        future.result()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Says how long an answer of one token took."""

    seconds: float
    """The seconds from the request to the first token."""
    timing: Timing
    """The timing that the engine reports."""


def first_token(engine: Engine, prompt: Prompt, policy: str) -> FirstToken:
    """Ask for one token, and wait for it. Raises what the request failed with."""
    events: queue.SimpleQueue[GenerationEvent] = queue.SimpleQueue()
    begin = time.perf_counter()
    engine.generate(greedy_request(prompt, policy), lambda _, event: events.put(event))
    event = events.get()
    seconds = time.perf_counter() - begin
    while not isinstance(event, Finished):
        if isinstance(event, Failed):
            raise event.error
        event = events.get()
    return FirstToken(seconds, event.timing)


def in_turn(
    competitors: Mapping[Key, Callable[[], Taken]],
    *,
    repeat: int,
    what: Callable[[Key], str] = str,
    progress: Progress = silent,
) -> dict[Key, list[Taken]]:
    """Measure every competitor once in each of ``repeat`` rounds, after a round that does not count.

    All take their turn in every round, so that a busy moment hits all alike, and every other round goes backwards, so
    that none always follows the same one. ``what`` names a competitor for ``progress``.
    """
    taken: dict[Key, list[Taken]] = {key: [] for key in competitors}
    order = list(competitors)
    for turn in range(repeat + 1):
        for key in order:
            progress(f"turn {turn} of {repeat}: {what(key)}")
            measured = competitors[key]()
            if turn:
                taken[key].append(measured)
        order.reverse()
    return taken


def seconds_of(call: Callable[[], object]) -> Callable[[], float]:
    """Wrap a call so that it returns the seconds that it takes."""

    def timed() -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    return timed


def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of a large copy, counting bytes read plus bytes written."""
    import torch

    source = torch.ones(2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the floating-point operations per second of a large matrix product."""
    import torch

    rows, inner, columns = 2048, 1024, 2816
    left = torch.randn(rows, inner, dtype=dtype, device=device)
    right = torch.randn(columns, inner, dtype=dtype, device=device)
    seconds = _median_seconds(lambda: torch.nn.functional.linear(left, right), device)
    return 2 * rows * inner * columns / seconds


def _median_seconds(call: Callable[[], object], device: torch.device, repeat: int = 9) -> float:
    import torch

    def synchronised() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = [seconds_of(synchronised)() for _ in range(repeat + 2)]
    return statistics.median(seconds[2:])
