"""kvlinker as a peer, in the embedded engine and in vLLM."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvlinker.base import own_process
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.quality.bench.harness.measurement import (
    Tokens,
    cache_chunks,
    decode_step,
    first_token,
    greedy_request,
)
from kvlinker.settings import WeightFormat
from kvlinker_lab.peers.peer import PeerKind, Task, register
from kvlinker_lab.peers.vllm_engine import VLLM, vllm_options

if TYPE_CHECKING:
    from kvlinker.llm import LLM

HOST_MEMORY = 8 << 30
"""Bytes that the tier with the chunks has room for."""


class KVLinkerPeer:
    """Runs a model in one of kvlinker's engines."""

    def __init__(self, llm: LLM, policy: str, *, scores: bool) -> None:
        """Take a running LLM; ``scores``: whether its engine scores prompts."""
        self._engine = llm.engine
        self._policy = policy
        self._scores = scores

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the log probabilities of all tokens but the first, in nats; None in vLLM."""
        if not self._scores:
            return None
        scored = self._engine.score(greedy_request(_fresh(tokens), "full")).result()
        logprobs: list[float] = scored.logprobs.tolist()
        return logprobs

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds to the first token."""
        return first_token(self._engine, _fresh(tokens), "full").seconds

    def decode_step(self, tokens: Tokens, *, steps: int) -> float:
        """Return the median seconds of a step."""
        return decode_step(
            self._engine, [_fresh(row.tolist()) for row in tokens], "full", steps=steps
        )

    def linked_decode_step(self, prompts: Sequence[Prompt], *, steps: int) -> float:
        """Return the median seconds of a step behind linked chunks, which the prompts share."""
        cache_chunks(self._engine, prompts[0])
        return decode_step(self._engine, prompts, self._policy, steps=steps)


@contextmanager
def start_kvlinker(
    task: Task, *, engine: Literal["embedded", "vllm"], weights: WeightFormat = "auto"
) -> Iterator[KVLinkerPeer]:
    """Load the task's model in an engine of kvlinker, with its weights in a format, and with a
    store of its own."""
    own_process.set_up()  # as a command does
    from kvlinker.llm import LLM
    from kvlinker.settings import load_settings

    options: dict[str, Any] = (
        {"kv_slots": task.kv_tokens(linking=True), "disk_space": 0}
        if engine == "embedded"
        else {"vllm_options": vllm_options(task, linking=True)}
    )
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as fresh:
        # What a GGUF file was unpacked into is found again, as at a user's second start.
        folder = Path(task.folder, engine) if task.gguf else Path(fresh)
        settings = load_settings(
            model=task.gguf or task.model,
            engine=engine,
            dtype=task.dtype,
            weights=weights,
            device=task.device,
            threads=task.threads,
            state_dir=folder,
            host_memory=HOST_MEMORY,
            prefix_cache="off",
            max_model_len=task.longest(linking=True),
            max_running=max(task.batches),
            max_variants=0,
            redis_url="",
            object_space=0,
            **options,
        )
        with LLM.from_settings(settings) as llm:
            yield KVLinkerPeer(llm, task.policy, scores=engine == "embedded")


def _fresh(tokens: Sequence[int]) -> Prompt:
    return Prompt((FreshSegment(tuple(tokens)),))


register(PeerKind("kvlinker", partial(start_kvlinker, engine="embedded")))
for _weights in ("int8", "int4"):
    register(
        PeerKind(
            f"kvlinker-{_weights}", partial(start_kvlinker, engine="embedded", weights=_weights)
        )
    )
register(
    replace(
        PeerKind("kvlinker-vllm", partial(start_kvlinker, engine="vllm"), **VLLM),
        modules=("vllm", "kvlinker_vllm"),
    )
)
