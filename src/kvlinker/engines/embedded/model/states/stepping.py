"""Steps into an unmodified transformers model where tokens change states.

Most modeling modules call a convolution and a rule by names of their own. Where a module writes its
rule out, its whole ``forward`` is the rule, or a part of it that is a module. Everything is
replaced once, process-wide, but for convolutions and shifts that are modules: these are a model's
own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from kvlinker.engines.embedded.model.interception import Interceptor, replace, replace_by_names
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
from kvlinker.engines.embedded.model.states.recurrence import (
    ConvolutionCall,
    convolved,
    token_before,
    unconvolved,
)
from kvlinker.engines.embedded.model.states.rules import Rule, RuleCall

Original = Callable[..., Any]
"""The model's own function that is replaced."""

BASE = 256
"""Ids in n-grams are kept by their digits in this base, which numbers of any precision have
exactly."""


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


def step_into_module(module: ModuleType) -> None:
    """Replace the convolution and the rules of a modeling module."""
    if not hasattr(module, CONVOLUTION):
        return
    rules = tuple(rule for rule in RULES if hasattr(module, rule.function))
    for rule in rules:
        replace_by_names(module, rule.function, partial(_apply, rule))
    replace(module, CONVOLUTION, partial(_convolve, rules))


def step_into_layers(model: Any) -> None:
    """Replace what writes its rule out among the modules of ``model``, and modules that convolve.
    The model does at once what it would do to its weights in its first pass, and never divides a
    pass."""
    for part in model.modules():
        if hasattr(part, RESCALE) and not (part.training or part.layers_are_rescaled):
            getattr(part, RESCALE)()
    if hasattr(model.config, TOKENS_AT_ONCE):
        setattr(model.config, TOKENS_AT_ONCE, sys.maxsize)
    for kind in {type(part) for part in model.modules()}:
        if hasattr(kind, LIGHTNING_DECAY):
            replace_by_names(kind, "forward", _lightning)
        if hasattr(kind, REAL_GATES):
            replace_by_names(kind, "forward", partial(_apply, REAL_GATED))
        if hasattr(kind, TIME_MIXING_INPUTS):
            replace_by_names(kind, "forward", _time_mixing)
        if hasattr(kind, NGRAMS):
            replace_by_names(kind, "forward", _ngrams)
    for part in model.modules():
        if hasattr(part, MATRIX_MEMORY_MODULE):
            backend = type(getattr(part, MATRIX_MEMORY_MODULE))
            replace_by_names(backend, "forward", _matrix_memory)
        if hasattr(part, CONVOLVED_PROJECTIONS):
            replace_by_names(type(part), "forward", _convolved_projections)
        if hasattr(part, FAR_CONVOLUTION):
            window = getattr(part, FAR_CONVOLUTION)
            replace(part.conv1d, "forward", partial(_convolve_far, window))
        if any(hasattr(child, REAL_GATES) for child in part.children()):
            for child in part.children():
                if isinstance(child, nn.Conv1d):
                    replace(child, "forward", partial(_convolve_channels, child))
        if hasattr(part, TOKEN_SHIFT) and not hasattr(part, TIME_MIXING_INPUTS):
            replace(getattr(part, TOKEN_SHIFT), "forward", _shift)


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


def _convolve_channels(
    module: nn.Conv1d, interceptor: Interceptor, original: Original, hidden: Tensor
) -> Tensor:
    """Convolve each channel with the tokens before, in the place of a module that does."""
    options = {"bias": module.bias}
    return interceptor.convolve(
        ConvolutionCall(convolved, hidden, module.weight[:, 0], options, (REAL_GATED,))
    )


def _convolve_far(
    window: int, interceptor: Interceptor, original: Original, hidden: Tensor
) -> Tensor:
    """Convolve tokens after ``window`` others, in the place of a module that does."""

    def behind_nothing(hidden: Tensor, weight: Tensor) -> Tensor:
        found: Tensor = original(F.pad(hidden, (window, 0)))
        return found

    width = hidden.new_empty(hidden.shape[1], window + 1)
    return interceptor.convolve(
        ConvolutionCall(behind_nothing, hidden[..., window:], width, {}, ())
    )


def _shift(interceptor: Interceptor, original: Original, hidden: Tensor) -> Tensor:
    """Return each token's neighbour, in the place of a module that does."""
    width = hidden.new_empty(hidden.shape[-1], 2)
    call = ConvolutionCall(token_before, hidden.transpose(1, 2), width, {}, ())
    return interceptor.convolve(call).transpose(1, 2)


def _lightning(interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    hidden, cache = given["hidden_states"], given.get("past_key_values")
    given["hidden_states"] = _entered(interceptor, hidden, LIGHTNING, window=0)
    given[LIGHTNING.final] = cache is not None
    output, last = interceptor.recur(RuleCall(LIGHTNING, original, given))
    if cache is not None:
        cache.set_linear_cache(given["self"].layer_idx, last)
    return output, last


def _time_mixing(interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    given["hidden"] = _entered(interceptor, given["hidden"], TIME_MIXING, window=1)
    return _apply(TIME_MIXING, interceptor, original, given)


def _ngrams(interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    module, ids = given["self"], given["input_ids"]
    if given.get("past_key_values") is not None:
        original(module, ids, given["past_key_values"])  # it keeps ids there
    return interceptor.convolve(of_tokens_before(original, module, ids)).transpose(1, 2)


def of_tokens_before(embed: Original, module: Any, ids: Tensor) -> ConvolutionCall:
    """Return the call for ``ids`` [1, tokens] of a module whose function is ``embed``: what each
    token's embedding is made of are its id and those of the tokens before it, as in a convolution.
    It takes the end of text for what stands before a text, of which all digits are therefore
    zeros."""
    size, end = int(module.unigram_vocab_size), int(module.eos_token_id)
    digits = next(count for count in range(1, 9) if BASE**count >= size)
    places = BASE ** torch.arange(digits, device=ids.device)[:, None]

    def embedded(entering: Tensor, weight: Tensor) -> Tensor:
        numbers = (entering.long() * places).sum(1) + end
        found: Tensor = embed(module, numbers % size, None)
        return found.transpose(1, 2)

    entering = ((ids - end) % size)[:, None] // places % BASE
    width = entering.new_empty(digits, int(module.context_len) + 1)
    weight: Tensor = module.ngram_embedding.weight
    return ConvolutionCall(embedded, entering.to(weight.dtype), width, {}, ())


def _convolved_projections(
    interceptor: Interceptor, original: Original, given: dict[str, Any]
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


def _matrix_memory(interceptor: Interceptor, original: Original, given: dict[str, Any]) -> Any:
    names = MATRIX_MEMORY.mixed
    parts = [given[name].transpose(1, 2) for name in names]  # [1, tokens, heads, dim]
    together = torch.cat([part.flatten(2) for part in parts], -1)
    entered = _entered(interceptor, together, MATRIX_MEMORY, window=0)
    divided = torch.split(entered, [part.shape[2] * part.shape[3] for part in parts], -1)
    for name, like, part in zip(names, parts, divided, strict=True):
        given[name] = part.reshape(like.shape).transpose(1, 2)
    given[MATRIX_MEMORY.final] = given.get("c_initial") is not None
    return _apply(MATRIX_MEMORY, interceptor, original, given)


def _entered(interceptor: Interceptor, hidden: Tensor, rule: Rule, *, window: int) -> Tensor:
    """Return what enters a rule without a convolution, [1, tokens, channels], with what chunks kept
    of their tokens, if the rule is made of it; its tokens see so many before them."""
    width = hidden.new_empty(hidden.shape[-1], window + 1)
    call = ConvolutionCall(unconvolved, hidden.transpose(1, 2), width, {}, (rule,))
    return interceptor.convolve(call).transpose(1, 2)
