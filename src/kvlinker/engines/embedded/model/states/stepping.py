"""Steps into an unmodified transformers model where tokens change states.

Most modeling modules call a convolution and a rule by names of their own. Where a module writes its
rule out, its whole ``forward`` is the rule. Everything is replaced once, for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

from torch import Tensor

from kvlinker.engines.embedded.model.interception import Interceptor, replace, replace_by_names
from kvlinker.engines.embedded.model.states.known import (
    CONVOLUTION,
    LIGHTNING,
    LIGHTNING_DECAY,
    RULES,
)
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall, unconvolved
from kvlinker.engines.embedded.model.states.rules import Rule, RuleCall

Original = Callable[..., Any]
"""The model's own function that is replaced."""


class AnyLength(Tensor):
    """The convolved inputs of more tokens than a model's code counts, until they are divided by
    heads."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.reshape:
            hidden, *shape = args
            return hidden.as_subclass(Tensor).reshape(*shape[:-1], hidden.shape[-1])
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


def step_into_module(module: ModuleType) -> None:
    """Replace the convolution and the rules of a modeling module."""
    if not hasattr(module, CONVOLUTION):
        return
    rules = tuple(rule for rule in RULES if hasattr(module, rule.function))
    for rule in rules:
        replace_by_names(module, rule.function, partial(_apply, rule))
    replace(module, CONVOLUTION, partial(_convolve, rules))


def step_into_layers(model: Any) -> None:
    """Replace the modules of ``model`` that write their rule out."""
    for kind in {type(part) for part in model.modules()}:
        if hasattr(kind, LIGHTNING_DECAY):
            replace_by_names(kind, "forward", _lightning)


def _apply(rule: Rule, interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    call = RuleCall(rule, original, given)
    return call.returned(*interceptor.recur(call))


def _convolve(
    rules: tuple[Rule, ...],
    interceptor: Interceptor,
    original: Original,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    options = {"bias": bias, "activation": activation}
    return interceptor.convolve(ConvolutionCall(original, hidden_states, weight, options, rules))


def _lightning(interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    hidden, cache = given["hidden_states"], given.get("past_key_values")
    width = hidden.new_empty(hidden.shape[-1], 1)
    unchanged = ConvolutionCall(unconvolved, hidden.transpose(1, 2), width, {}, (LIGHTNING,))
    given["hidden_states"] = interceptor.convolve(unchanged).transpose(1, 2)
    given[LIGHTNING.final] = cache is not None
    output, last = interceptor.recur(RuleCall(LIGHTNING, original, given))
    if cache is not None:
        cache.set_linear_cache(given["self"].layer_idx, last)
    return output, last
