"""From the last hidden states to logits, apart from the model's forward pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from kvlinker.engine.interception import Interceptor, active_interceptor
from kvlinker.errors import InvalidRequestError


class _OnlyHidden(BaseModelOutput):  # type: ignore[misc]
    """A decoder's output in which all but the last hidden states is None, whatever else models of its family have."""

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands where a decoder stood; its last hidden states are what it is given."""

    def forward(self, inputs_embeds: Tensor, **_: Any) -> BaseModelOutput:
        return _OnlyHidden(last_hidden_state=inputs_embeds)


class Head:
    """What a causal language model does behind its decoder: the head itself, and what scales or caps its logits.

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
        """Logits [rows, vocabulary] of ``hidden`` [rows, width]."""
        logits: Tensor = self._model(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return logits

    @contextmanager
    def watching(self, interceptor: Interceptor) -> Iterator[list[Tensor]]:
        """Lists the last hidden states [tokens, width] of each forward pass that ``interceptor`` steps into."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if active_interceptor() is interceptor:  # another engine's thread may run the same model
                seen.append(output[0][0])

        handle = self._decoder.register_forward_hook(keep)
        try:
            yield seen
        finally:
            handle.remove()
