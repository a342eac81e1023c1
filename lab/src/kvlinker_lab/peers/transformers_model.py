"""transformers as a peer: the model's own forward pass, with SDPA attention and a dynamic cache."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvlinker.quality.bench.harness.measurement import Tokens, transformers_decode_step
from kvlinker_lab.peers.peer import PeerKind, Task, register


class TransformersPeer:
    """Runs a model by itself."""

    def __init__(self, model: Any) -> None:
        """Take a causal language model of transformers."""
        self._model = model

    def logprobs(self, tokens: Sequence[int]) -> Sequence[float] | None:
        """Return the log probabilities of all tokens but the first, in nats."""
        import torch

        ids = torch.tensor([list(tokens)], device=self._model.device)
        with torch.inference_mode():
            logits = self._model(input_ids=ids).logits[0, :-1].float()
        logprobs_found: list[float] = (
            logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()
        )
        return logprobs_found

    def prefill(self, tokens: Sequence[int]) -> float:
        """Return the seconds to the first token, with the KV kept."""
        import torch

        begin = time.perf_counter()
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor([list(tokens)], device=self._model.device),
                use_cache=True,
                logits_to_keep=1,
            )
        output.logits.argmax().item()
        return time.perf_counter() - begin

    def decode_step(self, tokens: Tokens, *, steps: int) -> float:
        """Return the median seconds of a step."""
        return transformers_decode_step(self._model, tokens, steps=steps)


@contextmanager
def start_transformers(task: Task) -> Iterator[TransformersPeer]:
    """Load the task's model."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(task.threads)
    model = AutoModelForCausalLM.from_pretrained(
        task.model, dtype=task.dtype, attn_implementation="sdpa"
    )
    yield TransformersPeer(model.eval().to(task.device))


register(PeerKind("transformers", start_transformers))
