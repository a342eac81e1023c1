"""Gathers the log probabilities of a prompt's last tokens while the prompt is computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from kvlinker.embedded.model.interception import Interceptor, active_interceptor
from kvlinker.errors import InvalidRequestError
from kvlinker.prompt.segments import Prompt

ROWS_AT_ONCE = 128
"""Tokens whose logits are in memory at a time; with a large vocabulary, each takes a megabyte."""


class LogprobCollector:
    """Collects how likely each token behind a prompt's last chunk is after all that stands before it, in nats.

    The first of them is left out: what stands before it is a chunk, whose last token a policy may not compute.
    ``token_ids`` and ``logprobs`` are [scored], ``top_ids`` and ``top_logprobs`` [scored, top] with the most likely
    token first; complete once the fresh tokens are computed. What is computed again is collected again.
    """

    def __init__(self, prompt: Prompt, head: Head, *, top: int) -> None:
        """``head`` is the model's; ``top`` of the most likely tokens are kept, at most the vocabulary."""
        self._head = head
        self._first = max((span.end for span in prompt.spans), default=0)
        self.token_ids: NDArray[np.int64] = prompt.tokens[self._first + 1 :]
        scored = len(self.token_ids)
        self.logprobs = np.empty(scored, dtype=np.float32)
        self.top_ids = np.empty((scored, top), dtype=np.int64)
        self.top_logprobs = np.empty((scored, top), dtype=np.float32)

    def collect(self, start: int, hidden: Tensor) -> None:
        """Take the last hidden states [tokens, width] of the tokens from position ``start`` on."""
        begin = max(start, self._first)
        end = min(start + len(hidden), self._first + len(self.token_ids))  # nothing follows the prompt's last token
        for position in range(begin, end, ROWS_AT_ONCE):
            rows = hidden[position - start : min(position + ROWS_AT_ONCE, end) - start]
            self._record(position - self._first, self._head.logits(rows))

    def _record(self, begin: int, logits: Tensor) -> None:
        """Take the ``logits`` [rows, vocabulary] of what follows, from the scored token ``begin`` on."""
        taken = slice(begin, begin + len(logits))
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        following = torch.from_numpy(self.token_ids[taken]).to(logits.device)
        self.logprobs[taken] = logprobs.gather(1, following[:, None])[:, 0].cpu().numpy()
        best = logprobs.topk(self.top_ids.shape[1])
        self.top_ids[taken] = best.indices.cpu().numpy()
        self.top_logprobs[taken] = best.values.cpu().numpy()


class _OnlyHidden(BaseModelOutput):  # type: ignore[misc]
    """A decoder's output in which all but the last hidden states is None, whatever else models of its family have."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands where a decoder stood; its last hidden states are what it is given."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutput:
        return _OnlyHidden(last_hidden_state=inputs_embeds)


class Head:
    """Does what a causal language model does behind its decoder: the head itself, and what scales or caps its logits.

    It is the model's own code, in a copy of its outermost module that shares all weights.
    """

    def __init__(self, model: Any) -> None:
        """Raises InvalidRequestError for a model without a decoder inside."""
        name = model.base_model_prefix
        if name not in model._modules:
            raise InvalidRequestError(
                f"{type(model).__name__} has no decoder apart from its head, so it cannot score texts."
            )
        self._decoder: nn.Module = model._modules[name]
        self._model = copy.copy(model)
        self._model._modules = {**model._modules, name: _Given()}

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [rows, vocabulary] of ``hidden`` [rows, width]."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def watching(self, interceptor: Interceptor) -> Iterator[list[Tensor]]:
        """List the last hidden states [tokens, width] of each forward pass that ``interceptor`` steps into."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if active_interceptor() is interceptor:  # another engine's thread may run the same model
                seen.append(output[0][0])

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()
