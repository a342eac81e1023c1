"""The rules by which each token changes a state, in the forms in which modeling modules call
them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

CONVOLUTION = "causal_conv1d_fn"
"""The function by which modeling modules convolve what enters a rule."""

Mixed = tuple[Tensor, ...]
"""A rule's arguments that are made of the convolution's output: [batch, tokens, heads, dim] each,
or groups in place of heads, or without any."""

Gates = tuple[Tensor, ...]
"""A rule's other arguments with a value for each token: [batch, tokens, …] each."""


class Effect(NamedTuple):
    """What tokens do to any state: S → factor · S + offset."""

    factor: Tensor
    """[heads, rows, rows], or one number for each head, [heads, 1, 1], or for each element."""

    offset: Tensor
    """[heads, rows, columns]."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The form in which modeling modules call a function that changes a state by tokens."""

    function: str
    """The function's name."""

    mixed: tuple[str, ...]
    """The names of the arguments that are made of the convolution's output."""

    gates: tuple[str, ...]
    """The names of the other arguments with a value for each token."""

    written: str
    """The one of ``mixed`` that is written into the state."""

    final: str
    """The name of the flag that asks for the state behind the last token."""

    factor: Literal["matrix", "number", "elements"]
    """Tells whether a map's factor is a matrix that the state is multiplied by, one number for each
    head, or one for each element of the state."""

    initial: str = ""
    """The name of the argument that gives the state before the first token."""

    always_pairs: bool = False
    """Tells whether the function returns a pair even where no state is asked for."""

    takes_channels: bool = True
    """Tells whether the arguments are channels of the convolution's output, and not computed of
    it."""

    def argument(self, given: Tensor) -> Tensor:
        """Return one of the arguments with a value for each token: [batch, tokens, …]."""
        return given

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, heads, dim] of tokens whose arguments are ``changed``,
        and the state [batch, heads, rows, columns] behind them; before them it is ``state``, or
        zero."""
        given = {**arguments, **changed, self.initial: state, self.final: True}
        usual = given.get("chunk_size")
        if usual is not None:  # tokens are padded to a multiple of it
            given["chunk_size"] = min(usual, changed[self.written].shape[1])
        output, last = function(**given)
        return output, last

    def returned(
        self, arguments: Mapping[str, Any], output: Tensor, last: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of all tokens of the call, and the state behind them, as the function
        does."""
        return output, last


class SelectiveScan(Rule):
    """Mamba 1's: each element of the state fades by itself, and tokens are the last dimension of
    the function's arguments. It takes no state before the first token, of which what is left is
    therefore added here."""

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
    ) -> tuple[Tensor, Tensor | None]:
        output = output.transpose(1, 2)
        if arguments.get("z") is not None:
            output = output * F.silu(arguments["z"])
        return output, None if last is None else last[:, 0]


class LightningAttention(Rule):
    """MiniMax's: the function is a module's whole ``forward``, made of what enters it. It takes a
    state from a cache, and then a token after the other."""

    def scan(
        self,
        function: Callable[..., Any],
        arguments: Mapping[str, Any],
        changed: Mapping[str, Tensor],
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        hidden = changed[self.written]
        is_new = state is None or not state.any()  # which is computed in blocks of tokens
        cache = None if is_new or state is None else _HeldState(state.to(hidden.dtype))
        given = {**arguments, **changed, "past_key_values": cache}
        given.pop(self.final)
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
        """Take the state behind the last token, which is returned as well."""


def _fading(arguments: Mapping[str, Any], dt: Tensor) -> Tensor:
    """Return what is left of each element of a state behind each token: [batch, channels, tokens,
    columns]."""
    if arguments.get("delta_bias") is not None:
        dt = dt + arguments["delta_bias"].to(dt.dtype)[..., None]
    if arguments.get("delta_softplus"):
        dt = F.softplus(dt)
    return torch.exp(arguments["A"].float()[:, None] * dt.float().cumsum(-1)[..., None])


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


@dataclass(frozen=True, slots=True)
class RuleCall:
    """One call of a rule's function by a model."""

    rule: Rule
    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    """What the model hands over, by name."""

    @property
    def mixed(self) -> Mixed:
        """The arguments that are made of the convolution's output."""
        return tuple(self.rule.argument(self.arguments[name]) for name in self.rule.mixed)

    @property
    def gates(self) -> Gates:
        """The other arguments with a value for each token."""
        return tuple(self.rule.argument(self.arguments[name]) for name in self.rule.gates)

    @property
    def wants_state(self) -> bool:
        """Tells whether the model asks for the state behind the last token."""
        return bool(self.arguments.get(self.rule.final))

    def scan(self, mixed: Mixed, gates: Gates, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, …] of other tokens, and the state [batch, heads, rows,
        columns] behind them; before them it is ``state``, or zero."""
        changed = {
            **dict(zip(self.rule.mixed, mixed, strict=True)),
            **dict(zip(self.rule.gates, gates, strict=True)),
        }
        return self.rule.scan(self.function, self.arguments, changed, state)

    def returned(self, output: Tensor, last: Tensor | None) -> Any:
        """Return what the model gets: the output [1, tokens, …] of all tokens of the call, and the
        state [1, heads, rows, columns] behind them where it wants that."""
        output, last = self.rule.returned(self.arguments, output, last)
        return (output, last) if self.wants_state or self.rule.always_pairs else output

    def effect(self, mixed: Mixed, gates: Gates, before: Effect | None) -> Effect:
        """Return what tokens [1, tokens, …] do to any state, behind others that do ``before``."""
        offset = self.scan(mixed, gates, None if before is None else before.offset[None])[1]
        heads, rows, columns = offset.shape[1:]
        kind = self.rule.factor
        nothing = []
        for name, argument in zip(self.rule.mixed, mixed, strict=True):
            width = rows if kind == "matrix" else argument.shape[-1]
            written = argument.new_zeros(*argument.shape[:-1], width)
            nothing.append(written if name == self.rule.written else argument)
        if kind == "matrix":
            unit = torch.eye(rows, device=offset.device).expand(heads, rows, rows)
        else:
            unit = offset.new_ones(heads, 1, 1)
        state = (unit if before is None else before.factor).to(offset.dtype)
        if kind != "matrix":
            state = state.expand(heads, rows, columns)
        factor = self.scan(tuple(nothing), gates, state[None].contiguous())[1][0]
        return Effect(factor[:, :1, :1] if kind == "number" else factor, offset[0])
