"""Measures first tokens and steps of decoding, competitors in turn, a machine's limits, and cold
reads of chunk files."""

from __future__ import annotations

import os
import queue
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import in_own_thread
from kvlinker.base.types.answers import Delta, Timing
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.engines.contract.contract import (
    Engine,
    Failed,
    Finished,
    GenerationEvent,
    GenerationRequest,
)
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    import torch

TENANT = "bench"
"""The tenant whose chunks benchmarks cache."""

START_TOKENS = 512
"""Tokens that a request has room to decode while others of its batch have yet to begin."""

Tokens = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
"""Token ids, [requests, tokens]."""

Key = TypeVar("Key", bound=Hashable)
Taken = TypeVar("Taken")


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a prompt of cached chunks with fresh tokens behind them, all of random token
    ids."""

    chunks: int
    chunk_tokens: int
    fresh_tokens: int

    @property
    def tokens(self) -> int:
        """The length of the prompt."""
        return self.chunks * self.chunk_tokens + self.fresh_tokens

    def prompt(self, vocabulary: int, seed: int = 0) -> Prompt:
        """Make the prompt of ids below ``vocabulary``; equal seeds make equal prompts."""
        (prompt,) = self.prompts(vocabulary, 1, seed)
        return prompt

    def prompts(self, vocabulary: int, count: int, seed: int = 0) -> list[Prompt]:
        """Make ``count`` prompts that share their chunks and differ in their fresh tokens."""
        generator = np.random.default_rng(seed)

        def tokens(count: int) -> tuple[int, ...]:
            return tuple(generator.integers(0, vocabulary, count).tolist())

        cached = [CachedSegment(Chunk(tokens(self.chunk_tokens))) for _ in range(self.chunks)]
        return [Prompt((*cached, FreshSegment(tokens(self.fresh_tokens)))) for _ in range(count)]


def greedy_request(
    prompt: Prompt, policy: str, *, max_tokens: int = 1, sampling: SamplingFields | None = None
) -> GenerationRequest:
    """Make a request for exactly ``max_tokens`` tokens, sampled greedily unless ``sampling`` says
    otherwise."""
    fields: SamplingFields = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    fields.update(sampling or {})
    params = SamplingParams(**fields)  # type: ignore[arg-type]  # which it makes what they are to be
    return GenerationRequest(prompt, parse_policy(policy), params, TENANT)


def cache_chunks(engine: Engine, prompt: Prompt) -> None:
    """Compute the KV of all chunks of the prompt."""
    for future in [engine.cache_chunk(chunk, tenant=TENANT) for chunk in prompt.chunks]:
        future.result()


@dataclass(frozen=True, slots=True)
class FirstTokenAnswer:
    """The times of an answer of one token."""

    seconds: float
    """The seconds from the request to the first token."""
    timing: Timing
    """The timing that the engine reports."""


def first_token(engine: Engine, prompt: Prompt, policy: str) -> FirstTokenAnswer:
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
    return FirstTokenAnswer(seconds, event.timing)


def decode_step(
    engine: Engine,
    prompts: Sequence[Prompt],
    policy: str,
    *,
    steps: int,
    sampling: SamplingFields | None = None,
) -> float:
    """Return the median seconds of ``steps`` steps in which every prompt gets a token, greedily
    unless ``sampling`` says otherwise.

    Requests begin one after another: what is decoded before the last of them has its first token
    does not count. Raises what a request failed with, and InvalidRequestError where the first ends
    before the last begins.
    """
    events: queue.SimpleQueue[tuple[float, int, GenerationEvent]] = queue.SimpleQueue()

    def listen(request: int) -> Callable[[int, GenerationEvent], None]:
        return lambda _, event: events.put((time.perf_counter(), request, event))

    handles = [
        engine.generate(
            greedy_request(prompt, policy, max_tokens=steps + START_TOKENS, sampling=sampling),
            listen(request),
        )
        for request, prompt in enumerate(prompts)
    ]
    begun: set[int] = set()
    arrivals: list[float] = []
    ended = 0
    while ended < len(prompts):
        arrival, request, event = events.get()
        if isinstance(event, Failed):
            raise event.error
        if isinstance(event, Finished):
            ended += 1
        elif len(begun) == len(prompts) and not ended:
            arrivals += [arrival] * len(event.token_ids)
        elif isinstance(event, Delta) and event.token_ids:
            begun.add(request)
            if len(begun) == len(prompts):
                arrivals.append(arrival)
        if len(arrivals) > steps * len(prompts):
            for handle in handles:
                handle.cancel()
    return median_step(arrivals[: steps * len(prompts) + 1], requests=len(prompts))


@in_own_thread
def transformers_decode_step(model: Any, tokens: Tokens, *, steps: int) -> float:
    """Return the median seconds of ``steps`` steps of greedy decoding behind ``tokens`` with a
    transformers model.

    The model keeps its dynamic cache, and has whatever attention it is configured with.
    """
    import torch

    with torch.inference_mode():
        output = model(
            input_ids=torch.from_numpy(tokens).to(model.device), use_cache=True, logits_to_keep=1
        )
        times = []
        for _ in range(steps + 1):
            chosen = output.logits[:, -1].argmax(-1, keepdim=True)
            chosen.tolist()
            times.append(time.perf_counter())
            output = model(
                input_ids=chosen,
                past_key_values=output.past_key_values,
                use_cache=True,
                logits_to_keep=1,
            )
    return median_step(times)


def median_step(arrivals: Sequence[float], *, requests: int = 1) -> float:
    """Return the median seconds of a step, in each of which one token arrived for every one of
    ``requests``.

    Raises InvalidRequestError where no step is complete.
    """
    steps = [after - before for before, after in pairwise(arrivals[::requests])]
    if not steps:
        raise InvalidRequestError(
            "No step was decoded by all requests together: ask for smaller batches."
        )
    return statistics.median(steps)


def in_turn(
    competitors: Mapping[Key, Callable[[], Taken]],
    *,
    repeat: int,
    what: Callable[[Key], str] = str,
    progress: Progress = silent,
) -> dict[Key, list[Taken]]:
    """Measure every competitor once in each of ``repeat`` rounds, after a round that does not
    count.

    All take their turn in every round, so that a busy moment hits all alike, and every other round
    goes backwards, so that none always follows the same one. ``what`` names a competitor for
    ``progress``.
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


@in_own_thread
def copy_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second of a large copy, counting bytes read plus bytes written."""
    import torch

    source = torch.ones(2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), device)


@in_own_thread
def matmul_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Measure the floating-point operations per second: of products in registers alone in bf16 on
    a CPU with native code, else of a large matrix product."""
    import torch

    from kvlinker.engines.native.peaks import peaks

    if device.type == "cpu" and dtype == torch.bfloat16 and (most := peaks()) is not None:
        return most.operations_per_s
    rows, inner, columns = 2048, 1024, 2816
    left = torch.randn(rows, inner, dtype=dtype, device=device)
    right = torch.randn(columns, inner, dtype=dtype, device=device)
    seconds = _median_seconds(lambda: torch.nn.functional.linear(left, right), device)
    return 2 * rows * inner * columns / seconds


def _median_seconds(call: Callable[[], object], device: torch.device) -> float:
    import torch

    def synchronised() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = [seconds_of(synchronised)() for _ in range(11)]
    return statistics.median(seconds[2:])


def chunk_files(folder: Path) -> list[Path]:
    """Return all chunk files below a state directory, sorted."""
    return sorted(folder.rglob("*.safetensors"))


def check_cold_reads() -> None:
    """Raise InvalidRequestError if the page cache cannot be emptied of files."""
    if not hasattr(os, "posix_fadvise"):
        raise InvalidRequestError(
            "This system has no posix_fadvise, which cold reads need: run it on Linux."
        )


def drop_from_page_cache(files: Sequence[Path]) -> None:
    """Drop synchronised files from the page cache, so that the next read is one of the disk."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
