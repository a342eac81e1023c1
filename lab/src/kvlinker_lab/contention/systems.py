"""Runs a model in kvlinker's engines or in llama.cpp, with its measurements."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.contract import Engine, Failed, Finished, GenerationEvent
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.measurement import (
    TENANT,
    Workload,
    cache_chunks,
    first_token,
    greedy_request,
    seconds_of,
)

if TYPE_CHECKING:
    from kvlinker.llm import LLM

KVLINKER, IN_VLLM, LLAMA_CPP = SYSTEMS = ("kvlinker", "kvlinker-vllm", "llama.cpp")

POLICIES = ("full", "naive", "legolink-16")
TOKEN = "token"
MEASURED = (*POLICIES, TOKEN)
"""The measurements: the time to the first token by policy, and the time per token of an answer."""

TOKENS = 33
"""The tokens of the answer that is timed; the first one is not counted."""
KV_CACHE = 1 << 30
"""Bytes of vLLM's KV cache."""


@dataclass(frozen=True)
class Task:
    """The work of a process: its system, and the disturbances beside it. All values are ones that
    JSON has."""

    system: str
    """One of ``SYSTEMS``."""
    model: str | None
    """The model's path or hub id; for llama.cpp, a GGUF file."""
    shape: str | None
    """The shape of random weights, in place of a model."""
    workload: tuple[int, int, int]
    """Chunks, tokens of each, and fresh tokens."""
    repeat: int = 1
    disturbances: tuple[str, ...] = ()
    """Names of the disturbances of the measurements, one after the other."""
    busy: tuple[int, ...] = ()
    """Paused processes that compute all the time."""
    another: tuple[int, ...] = ()
    """Paused processes whose engines answer all the time."""
    group: str | None = None
    """The control group that the process joins first."""


@dataclass(frozen=True)
class System:
    """The calls that a running system answers."""

    measurements: Mapping[str, Callable[[], float]]
    """Each returns seconds; by names of ``MEASURED``."""
    create_chunk: Callable[[], object] | None
    """Creates a chunk that was not there before, and returns when it is there; None for
    llama.cpp."""


@contextmanager
def run_system(task: Task) -> Iterator[System]:
    """Run the task's system."""
    with (_llama_cpp if task.system == LLAMA_CPP else _kvlinker)(task) as system:
        yield system


@contextmanager
def _kvlinker(task: Task) -> Iterator[System]:
    with run_llm(task) as (llm, prompt):
        generator = np.random.default_rng(0)

        def create_chunk() -> None:
            tokens = generator.permutation(prompt.chunks[0].tokens)
            llm.engine.cache_chunk(Chunk(tuple(tokens.tolist())), tenant=TENANT).result()

        yield System(
            {policy: partial(_first_token, llm.engine, prompt, policy) for policy in POLICIES}
            | {TOKEN: partial(seconds_per_token, llm.engine, prompt, "naive")},
            create_chunk,
        )


@contextmanager
def run_llm(task: Task) -> Iterator[tuple[LLM, Prompt]]:
    """Run one of kvlinker's engines; return a prompt, too, whose chunks are cached."""
    from kvlinker.settings import load_settings

    settings = load_settings(
        **({} if task.model is None else {"model": task.model}),
        vllm_options={"enable_prefix_caching": False, "kv_cache_memory_bytes": KV_CACHE},
    )
    subject = Setup(settings, task.shape).subject()
    workload = Workload(*task.workload)
    prompt = workload.prompt(subject.loaded.vocabulary)
    room = 2 * (workload.tokens + TOKENS)
    if task.system == IN_VLLM:
        from kvlinker_vllm.ttft_benchmark import running_vllm

        running = running_vllm(subject, settings, room)
    else:
        running = subject.llm(kv_slots=room)
    with running as llm:
        cache_chunks(llm.engine, prompt)
        yield llm, prompt


def _first_token(engine: Engine, prompt: Prompt, policy: str) -> float:
    return first_token(engine, prompt, policy).seconds


def seconds_per_token(engine: Engine, prompt: Prompt, policy: str) -> float:
    """Return the mean seconds per token of an answer: a median would not see a thread that waits
    for its turn."""
    arrivals: queue.SimpleQueue[tuple[float, GenerationEvent]] = queue.SimpleQueue()
    engine.generate(
        greedy_request(prompt, policy, max_tokens=TOKENS),
        lambda _, event: arrivals.put((time.perf_counter(), event)),
    )
    times = []
    while not isinstance((came := arrivals.get())[1], Finished):
        if isinstance(came[1], Failed):
            raise came[1].error
        times.append(came[0])
    return (times[-1] - times[0]) / (TOKENS - 1)


@contextmanager
def _llama_cpp(task: Task) -> Iterator[System]:
    """Run llama.cpp, in as many threads as its own programs. Its first token of ``naive`` is that
    behind the same prompt's chunks, whose KV it still has."""
    import llama_cpp

    from kvlinker_lab.peers.llama_cpp_model import llama_context, llama_model

    workload = Workload(*task.workload)
    with llama_model(Path(str(task.model))) as model:
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        tokens = workload.prompt(vocabulary).tokens[None]
        cached = workload.tokens - workload.fresh_tokens
        with llama_context(
            model, vocabulary, 1, workload.tokens + TOKENS, psutil.cpu_count(logical=False) or 1
        ) as context:

            def prefill(position: int) -> None:
                context.forget(position)
                context.prefill(tokens[:, position:], position).argmax()

            def seconds_per_token() -> float:
                prefill(cached)
                begin = time.perf_counter()
                for step in range(TOKENS - 1):
                    context.append(np.array([[step]]), workload.tokens + step).argmax()
                return (time.perf_counter() - begin) / (TOKENS - 1)

            full, naive = (seconds_of(partial(prefill, position)) for position in (0, cached))
            yield System({"full": full, "naive": naive, TOKEN: seconds_per_token}, None)
