"""Lightning attention, MiniMax's linear attention: each head's state fades by a number of its
own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvlinker.engines.embedded.model.states.rules import Rule


class LightningAttention(Rule):
    """The function is a module's whole ``forward``, made of what enters it. It takes a state from a
    cache for one token alone; of several it computes blocks, from a state of zeros on."""

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        hidden = changed[self.written]
        given = {**arguments, **changed, "past_key_values": None}
        given.pop(self.final, None)
        if state is None:
            output, last = function(**given)
        elif hidden.shape[1] == 1:
            output, last = function(**given | {"past_key_values": _HeldState(state.to(hidden))})
        else:
            with _Begins(state.to(hidden)):
                output, last = function(**given)
        return output, last.float()


class _HeldState:
    """The cache of one layer."""

    def __init__(self, state: Tensor) -> None:
        self._state = state

    def get_linear_cache(self, layer: int) -> Tensor:
        """Return the state before the first token."""
        return self._state

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        """Take the state after the last token, which is returned as well."""


class _Begins(TorchFunctionMode):
    """Replaces the zeros of its shape that a model begins with by a given state."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self._state = state

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.zeros and args == tuple(self._state.shape):
            return self._state
        return func(*args, **(kwargs or {}))
