"""The rules that are known, and the names by which modeling modules have them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvlinker.engines.embedded.model.states.rules import Rule


class SelectiveScan(Rule):
    """Mamba 1's rule, under which each element of a state fades by itself.

    Tokens are the last dimension of the function's arguments. The function takes no state before
    the first token, so ``scan`` adds what is left of that state.
    """

    def argument(self, given: Tensor) -> Tensor:
        return given.transpose(1, 2)

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        given = {name: part.transpose(1, 2) for name, part in changed.items()}
        output, last = function(**{**arguments, **given, "z": None, self.final: True})
        if state is not None:
            kept = _fading(arguments, given["dt"]) * state[:, 0, :, None]
            output = output + torch.einsum("bdtn,bnt->bdt", kept, given["C"].float())
            last = last + kept[:, :, -1]
        return output.transpose(1, 2), last[:, None].float()

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Any]:
        output = output.transpose(1, 2)
        if arguments.get("z") is not None:
            output = output * F.silu(arguments["z"])
        return output, None if last is None else last[:, 0]


def _fading(arguments: Mapping[str, Any], dt: Tensor) -> Tensor:
    """Return what is left of each element of a state after each token: [batch, channels, tokens,
    columns]."""
    if arguments.get("delta_bias") is not None:
        dt = dt + arguments["delta_bias"].to(dt.dtype)[..., None]
    if arguments.get("delta_softplus"):
        dt = F.softplus(dt)
    return torch.exp(arguments["A"].float()[:, None] * dt.float().cumsum(-1)[..., None])


class LightningAttention(Rule):
    """MiniMax's linear attention: each head's state fades by a number of its own.

    The function is a module's whole ``forward``, made of what enters it. It takes a state from a
    cache for one token alone; of several it computes blocks, from a state of zeros on.
    """

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


CONVOLUTION = "causal_conv1d_fn"
"""The function by which modeling modules convolve what enters a rule."""

RULES = (
    *(
        Rule(
            name,
            ("query", "key", "value"),
            ("g", "beta"),
            "value",
            "output_final_state",
            "matrix",
            initial="initial_state",
            always_pairs=True,
        )
        for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    ),
    Rule(
        "mamba2_chunk_scan",
        ("hidden_states", "B", "C"),
        ("dt",),
        "hidden_states",
        "return_final_states",
        "number",
        initial="initial_states",
    ),
    SelectiveScan(
        "mamba_selective_scan",
        ("hidden_states", "dt", "B", "C"),
        (),
        "hidden_states",
        "return_last_state",
        "elements",
        takes_channels=False,
    ),
)
"""The functions of modeling modules that apply a rule after a convolution."""

LIGHTNING_DECAY = "get_slope_rate"
"""The method by which lightning attention says how its state fades."""

LIGHTNING = LightningAttention(
    "forward",
    ("hidden_states",),
    (),
    "hidden_states",
    "returns_state",
    "number",
    always_pairs=True,
    takes_channels=False,
)
