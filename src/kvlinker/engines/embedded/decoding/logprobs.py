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

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import PromptLogprobs, Usage
from kvlinker.engines.embedded.model.interception import Interceptor, active_interceptor
from kvlinker.prompting.segments import Prompt

ROWS_AT_ONCE = 128
"""The number of tokens whose logits are in memory at a time; with a large vocabulary, each takes a
megabyte."""


def first_scored(prompt: Prompt) -> int:
    """Return the position of the first token of a linked prompt that can be scored: the second one
    behind its last chunk, since predicting the first needs the chunk's last token, which a policy
    may not compute."""
    return max((span.end for span in prompt.spans), default=0) + 1


class LogprobCollector:
    """Collects the log probability, in nats, of each token from a position on, given all tokens
    before it.

    ``token_ids`` and ``logprobs`` are [scored], ``top_ids`` and ``top_logprobs`` [scored, top] with
    the most likely token first; complete once the tokens that predict them are computed. Tokens
    that are computed again are collected again.
    """

    def __init__(self, tokens: NDArray[np.int64], head: Head, *, first: int, top: int) -> None:
        """Score ``tokens`` [length] from position ``first`` (at least 1) on. ``head`` computes
        logits; ``top`` alternatives are kept per token, at most the vocabulary."""
        self._head = head
        self._first = first - 1
        self.token_ids: NDArray[np.int64] = tokens[first:]
        scored = len(self.token_ids)
        self.logprobs = np.empty(scored, dtype=np.float32)
        self.top_ids = np.empty((scored, top), dtype=np.int64)
        self.top_logprobs = np.empty((scored, top), dtype=np.float32)

    def collect(self, start: int, hidden: Tensor) -> None:
        """Take the last hidden states [tokens, width] of the tokens from position ``start`` on."""
        begin = max(start, self._first)
        end = min(
            start + len(hidden), self._first + len(self.token_ids)
        )  # nothing follows the prompt's last token
        for position in range(begin, end, ROWS_AT_ONCE):
            rows = hidden[position - start : min(position + ROWS_AT_ONCE, end) - start]
            self._record(position - self._first, self._head.logits(rows))

    def result(self, usage: Usage) -> PromptLogprobs:
        """Return what was collected, with the ``usage`` of the request."""
        return PromptLogprobs(self.token_ids, self.logprobs, self.top_ids, self.top_logprobs, usage)

    def _record(self, begin: int, logits: Tensor) -> None:
        """Store the log probabilities from ``logits`` [rows, vocabulary], which predict the scored
        tokens from ``begin`` on."""
        taken = slice(begin, begin + len(logits))
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        following = torch.from_numpy(self.token_ids[taken]).to(logits.device)
        self.logprobs[taken] = logprobs.gather(1, following[:, None])[:, 0].cpu().numpy()
        best = logprobs.topk(self.top_ids.shape[1])
        self.top_ids[taken] = best.indices.cpu().numpy()
        self.top_logprobs[taken] = best.values.cpu().numpy()


class _OnlyHidden(BaseModelOutput):  # type: ignore[misc]
    """A decoder's output with the last hidden states alone; every other field is None, whatever the
    model's family adds."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Replaces a decoder and returns the hidden states that it is given as its last ones."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutput:
        return _OnlyHidden(last_hidden_state=inputs_embeds)


class Head:
    """Computes what a causal language model computes behind its decoder: the head, and any scaling
    or capping of its logits.

    It is the model's own code, in a copy of its outermost module that shares all weights.
    """

    def __init__(self, model: Any) -> None:
        """Raises InvalidRequestError for a model without a decoder inside."""
        name = model.base_model_prefix
        if name not in model._modules:
            raise InvalidRequestError(
                f"{type(model).__name__} has no decoder apart from its head, so it cannot score"
                " texts."
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
        """List the last hidden states [tokens, width] of each forward pass that ``interceptor``
        steps into."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if (
                active_interceptor() is interceptor
            ):  # another engine's thread may run the same model
                seen.append(output[0][0])

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()
