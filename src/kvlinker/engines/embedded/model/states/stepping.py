"""Intercepts an unmodified transformers model where tokens change states.

Most modeling modules call a convolution and a rule by names of their own. Where a module writes its
rule out, its whole ``forward`` is the rule, or a part of it that is a module. Everything is wrapped
once, process-wide, but for convolutions and shifts that are modules: these are a model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from inspect import Signature, signature
from types import ModuleType
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvlinker.engines.embedded.model.states.known import (
    CONVOLUTION,
    CONVOLVED_PROJECTIONS,
    FAR_CONVOLUTION,
    LIGHTNING,
    LIGHTNING_DECAY,
    MATRIX_MEMORY,
    MATRIX_MEMORY_MODULE,
    NGRAMS,
    REAL_GATED,
    REAL_GATES,
    RESCALE,
    RULES,
    TIME_MIXING,
    TIME_MIXING_INPUTS,
    TOKEN_SHIFT,
    TOKENS_AT_ONCE,
)
from kvlinker.engines.embedded.model.states.ngrams import of_tokens_before
from kvlinker.engines.embedded.model.states.recurrence import (
    ConvolutionCall,
    convolved,
    token_before,
    unconvolved,
)
from kvlinker.engines.embedded.model.states.rules import Rule, RuleCall

MARK = "__kvlinker__"
"""The attribute of functions that were wrapped."""


class StateInterceptor(Protocol):
    """Replaces convolutions and rules during one forward pass."""

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """Called when the model is about to convolve; returns [1, channels, tokens], from which the
        model makes the arguments of the rule after it, if there is one."""
        ...

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        """Apply the rule that follows a convolution; returns its output [1, tokens, heads, dim],
        and the last state [1, heads, rows, columns] if the model wants it."""
        ...


Active = Callable[[], StateInterceptor | None]
"""Returns the interceptor of the forward pass that this thread is in; None outside of one."""


class AnyLength(Tensor):
    """What is convolved of more tokens than a model's code counts, until it is divided by heads."""

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


def step_into_module(module: ModuleType, active: Active) -> None:
    """Wrap the convolution and the rules of a modeling module."""
    if not hasattr(module, CONVOLUTION):
        return
    rules = [rule for rule in RULES if hasattr(module, rule.function)]
    for rule in rules:
        _wrap_rule(module, rule, active)
    _wrap_convolution(module, tuple(rules), active)


def step_into_layers(model: Any, active: Active) -> None:
    """Wrap what writes its rule out among the modules of ``model``, and modules that convolve. The
    model does at once what it would do to its weights in its first pass, and never divides a
    pass."""
    for part in model.modules():
        if hasattr(part, RESCALE) and not (part.training or part.layers_are_rescaled):
            getattr(part, RESCALE)()
    if hasattr(model.config, TOKENS_AT_ONCE):
        setattr(model.config, TOKENS_AT_ONCE, sys.maxsize)
    for kind in {type(part) for part in model.modules()}:
        if hasattr(kind, LIGHTNING_DECAY):
            _wrap_forward(kind, _lightning, active)
        if hasattr(kind, REAL_GATES):
            _wrap_forward(kind, _real_gated, active)
        if hasattr(kind, TIME_MIXING_INPUTS):
            _wrap_forward(kind, _time_mixing, active)
        if hasattr(kind, NGRAMS):
            _wrap_forward(kind, _ngrams, active)
    for part in model.modules():
        if hasattr(part, MATRIX_MEMORY_MODULE):
            _wrap_forward(type(getattr(part, MATRIX_MEMORY_MODULE)), _matrix_memory, active)
        if hasattr(part, CONVOLVED_PROJECTIONS):
            _wrap_forward(type(part), _convolved_projections, active)
        if hasattr(part, FAR_CONVOLUTION):
            _wrap_far_convolution(part.conv1d, getattr(part, FAR_CONVOLUTION), active)
        if any(hasattr(child, REAL_GATES) for child in part.children()):
            for child in part.children():
                if isinstance(child, nn.Conv1d):
                    _wrap_convolving(child, active)
        if hasattr(part, TOKEN_SHIFT) and not hasattr(part, TIME_MIXING_INPUTS):
            _wrap_shift(getattr(part, TOKEN_SHIFT), active)


def replace(owner: ModuleType | type | nn.Module, name: str, wrapped: Any) -> None:
    """Put a wrapped function in the place of the owner's."""
    setattr(wrapped, MARK, True)
    setattr(owner, name, wrapped)


def _wrap_convolution(module: ModuleType, rules: tuple[Rule, ...], active: Active) -> None:
    original = getattr(module, CONVOLUTION)
    if hasattr(original, MARK):
        return

    @wraps(original)
    def causal_conv1d_fn(
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        interceptor = active()
        if interceptor is None:
            found: Tensor = original(hidden_states, weight, bias, activation, **kwargs)
            return found
        options = {"bias": bias, "activation": activation}
        return interceptor.convolve(
            ConvolutionCall(original, hidden_states, weight, options, rules)
        )

    replace(module, CONVOLUTION, causal_conv1d_fn)


def _wrap_rule(module: ModuleType, rule: Rule, active: Active) -> None:
    original = getattr(module, rule.function)
    if hasattr(original, MARK):
        return
    form = signature(original)

    @wraps(original)
    def apply(*args: Any, **kwargs: Any) -> Any:
        interceptor = active()
        if interceptor is None:
            return original(*args, **kwargs)
        call = RuleCall(rule, original, _arguments(form, args, kwargs))
        return call.returned(*interceptor.recur(call))

    replace(module, rule.function, apply)


Written = Callable[[StateInterceptor, Callable[..., Any], dict[str, Any]], Any]
"""Computes in the place of a module's ``forward``, given that and its arguments by name, the module
itself as ``self``."""


def _wrap_forward(kind: type[nn.Module], written: Written, active: Active) -> None:
    original: Callable[..., Any] = kind.forward
    if hasattr(original, MARK):
        return
    form = signature(original)

    @wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        interceptor = active()
        if interceptor is None:
            return original(*args, **kwargs)
        return written(interceptor, original, _arguments(form, args, kwargs))

    replace(kind, "forward", forward)


def _lightning(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    hidden, cache = given["hidden_states"], given.get("past_key_values")
    given["hidden_states"] = _entered(interceptor, hidden, LIGHTNING, window=0)
    given[LIGHTNING.final] = cache is not None
    output, last = interceptor.recur(RuleCall(LIGHTNING, original, given))
    if cache is not None:
        cache.set_linear_cache(given["self"].layer_idx, last)
    return output, last


def _real_gated(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    call = RuleCall(REAL_GATED, original, given)
    return call.returned(*interceptor.recur(call))


def _time_mixing(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    given["hidden"] = _entered(interceptor, given["hidden"], TIME_MIXING, window=1)
    call = RuleCall(TIME_MIXING, original, given)
    return call.returned(*interceptor.recur(call))


def _ngrams(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    module, ids = given["self"], given["input_ids"]
    if given.get("past_key_values") is not None:
        original(module, ids, given["past_key_values"])  # it keeps ids there
    return interceptor.convolve(of_tokens_before(original, module, ids)).transpose(1, 2)


def _convolved_projections(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> tuple[Tensor, ...]:
    module, hidden, cache = given["self"], given["hidden_states"], given["past_key_values"]
    if cache is not None:
        cache.update_conv_state(hidden.mT[..., -module.conv_kernel_size :], module.layer_idx)
    shapes: list[torch.Size] = []

    def projected(entering: Tensor, weight: Tensor) -> Tensor:
        found = original(module, entering.transpose(1, 2), None)
        shapes[:] = [each.shape[2:] for each in found]
        return torch.cat([each.flatten(2) for each in found], -1).transpose(1, 2)

    width = hidden.new_empty(hidden.shape[-1], module.conv_kernel_size + 1)
    call = ConvolutionCall(projected, hidden.transpose(1, 2), width, {}, ())
    together = interceptor.convolve(call).transpose(1, 2)
    parts = torch.split(together, [shape.numel() for shape in shapes], -1)
    return tuple(
        part.reshape(*part.shape[:2], *shape) for part, shape in zip(parts, shapes, strict=True)
    )


def _matrix_memory(
    interceptor: StateInterceptor, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    names = MATRIX_MEMORY.mixed
    parts = [given[name].transpose(1, 2) for name in names]  # [1, tokens, heads, dim]
    together = torch.cat([part.flatten(2) for part in parts], -1)
    entered = _entered(interceptor, together, MATRIX_MEMORY, window=0)
    divided = torch.split(entered, [part.shape[2] * part.shape[3] for part in parts], -1)
    for name, like, part in zip(names, parts, divided, strict=True):
        given[name] = part.reshape(like.shape).transpose(1, 2)
    given[MATRIX_MEMORY.final] = given.get("c_initial") is not None
    call = RuleCall(MATRIX_MEMORY, original, given)
    return call.returned(*interceptor.recur(call))


def _entered(interceptor: StateInterceptor, hidden: Tensor, rule: Rule, *, window: int) -> Tensor:
    """Return what enters a rule without a convolution, [1, tokens, channels], with what chunks kept
    of their tokens, if the rule is made of it; its tokens see so many before them."""
    width = hidden.new_empty(hidden.shape[-1], window + 1)
    call = ConvolutionCall(unconvolved, hidden.transpose(1, 2), width, {}, (rule,))
    return interceptor.convolve(call).transpose(1, 2)


def _wrap_convolving(module: nn.Conv1d, active: Active) -> None:
    """Have a module that convolves each channel with the tokens before call the interceptor."""
    original = module.forward
    if hasattr(original, MARK):
        return

    @wraps(original)
    def forward(hidden: Tensor) -> Tensor:
        interceptor = active()
        if interceptor is None:
            return original(hidden)
        options = {"bias": module.bias}
        return interceptor.convolve(
            ConvolutionCall(convolved, hidden, module.weight[:, 0], options, (REAL_GATED,))
        )

    replace(module, "forward", forward)


def _wrap_far_convolution(module: nn.Conv1d, window: int, active: Active) -> None:
    """Have a module that convolves tokens after ``window`` others call the interceptor."""
    original = module.forward
    if hasattr(original, MARK):
        return

    def behind_nothing(hidden: Tensor, weight: Tensor) -> Tensor:
        return original(F.pad(hidden, (window, 0)))

    @wraps(original)
    def forward(hidden: Tensor) -> Tensor:
        interceptor = active()
        if interceptor is None:
            return original(hidden)
        width = hidden.new_empty(hidden.shape[1], window + 1)
        return interceptor.convolve(
            ConvolutionCall(behind_nothing, hidden[..., window:], width, {}, ())
        )

    replace(module, "forward", forward)


def _wrap_shift(module: nn.Module, active: Active) -> None:
    """Have a module that gives each token its neighbour call the interceptor."""
    original = module.forward
    if hasattr(original, MARK):
        return

    @wraps(original)
    def forward(hidden: Tensor) -> Tensor:
        interceptor = active()
        if interceptor is None:
            shifted: Tensor = original(hidden)
            return shifted
        width = hidden.new_empty(hidden.shape[-1], 2)
        call = ConvolutionCall(token_before, hidden.transpose(1, 2), width, {}, ())
        return interceptor.convolve(call).transpose(1, 2)

    replace(module, "forward", forward)


def _arguments(form: Signature, args: Iterable[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    bound = form.bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = dict(bound.arguments)
    others: dict[str, Any] = given.pop("kwargs", {})
    return given | others
