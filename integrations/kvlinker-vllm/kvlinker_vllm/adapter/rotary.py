"""Finds the rotary embeddings of vLLM's models, runs them, and observes their inputs and outputs,
and attention's inputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from kvlinker_vllm.adapter.attention_layers import AttentionLayer, first_of
from kvlinker_vllm.adapter.bound_model import BoundModel
from kvlinker_vllm.adapter.transformers_modules import FunctionRotary, watch_rotary_functions


def rotate(rotary: Any, positions: Tensor, key: Tensor) -> Tensor:
    """Return ``key`` [tokens, heads, head_dim] with the model's rotary embedding of ``positions``
    [tokens], by its kernel.

    Where the model is compiled, calling the module would run plain PyTorch, which takes many times
    as long. May change ``key``.
    """
    kernel = getattr(rotary, f"forward_{key.device.type}", rotary)
    apart = isinstance(rotary, DeepseekScalingRotaryEmbedding)
    given = key if apart else key.flatten(1)
    query = key[:, :1].clone() if apart else key[:, 0].clone()  # some take no key without one
    if key.device.type == "cuda" and not apart:
        query = given.clone()  # its heads must be a multiple of the key's
    rotated: Tensor = kernel(positions, query, given)[1]
    return rotated.view_as(key)


@contextmanager
def watch_attention(bound: BoundModel, *, rotated: Any, attended: Any) -> Iterator[None]:
    """Call back from passes by the modules, as long as the context lasts.

    ``rotated(module, positions, key)`` gets keys [tokens, heads * head_dim] before their rotary
    embedding. ``attended(layer_name, query, key, value)``, right after it, gets the arguments of
    attention. Neither is called for layers that attend to another one's KV.
    """
    watch = _Watch(rotated, attended)
    with ExitStack() as undo:
        for module in bound.model.modules():
            if _is_rotary(module):
                before = module.register_forward_pre_hook(watch.before_rotary, with_kwargs=True)
                undo.callback(before.remove)
                undo.callback(module.register_forward_hook(watch.behind_rotary).remove)
            elif "norm" in type(module).__name__.lower():
                undo.callback(module.register_forward_hook(watch.behind_norm).remove)
        for layer in bound.layers:  # transformers' modules call no more than their forward
            module = layer.module
            undo.callback(delattr, module, "forward")
            module.forward = partial(watch.attend, layer, module.forward)
        undo.enter_context(watch_rotary_functions(bound.model, watch.behind_function))
        yield


@dataclass(slots=True)
class _Rotation:
    """One call of what rotates: keys before and after it, in the shape that it takes them."""

    rotary: Any
    positions: Tensor
    key: Tensor
    turned: Tensor | None = None


class _Watch:
    """Keeps keys before their rotary embedding until attention is called."""

    def __init__(self, rotated: Any, attended: Any) -> None:
        self._rotated = rotated
        self._attended = attended
        self._pending: list[_Rotation] = []

    def before_rotary(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Keep a key, in whose place the rotated one may be written."""
        positions, _, key = first_of(args, kwargs, ("positions", "query", "key"))
        if key is not None:
            self._pending.append(_Rotation(module, positions, key.clone()))

    def behind_rotary(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep the result of a rotation."""
        if self._pending and isinstance(output, tuple):
            self._pending[-1].turned = output[1]

    def behind_function(
        self, rotary: FunctionRotary, positions: Tensor, key: Tensor, turned: Tensor
    ) -> None:
        """Keep what a function rotated, [heads, tokens, width], of which the last call counts."""
        self._pending = [_Rotation(rotary, positions, key, turned)]

    def behind_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Normalise the key before its rotation where the model does so after it."""
        if self._pending and args:
            last = self._pending[-1]
            if last.turned is not None and have_same_numbers(args[0], last.turned):
                last.key = normalise_keys(module, last.key, args[0])
                last.turned = None

    def attend(
        self, layer: AttentionLayer, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call back for rotated keys and for attention, and attend."""
        query, key, value = layer.arguments_of(args, kwargs)
        for each in self._pending:
            unrotated = each.key
            if isinstance(each.rotary, FunctionRotary):  # which sees no parts that are not rotated
                unrotated = layer.by_heads(key, value)[0].clone()
                unrotated[..., : each.key.shape[-1]] = each.key.transpose(0, 1)
                unrotated = unrotated.flatten(1)
            self._rotated(each.rotary, each.positions, unrotated)
        self._pending.clear()
        self._attended(layer.name, query, key, value)
        return forward(*args, **kwargs)


def have_same_numbers(given: Tensor, turned: Tensor) -> bool:
    """Return whether a norm's input is the keys that were rotated, perhaps in another shape and
    precision."""
    return given.numel() == turned.numel() and torch.equal(
        given.flatten(), turned.to(given.dtype).flatten()
    )


def normalise_keys(norm: nn.Module, key: Tensor, like: Tensor) -> Tensor:
    """Return keys before their rotation, normalised as the rotated keys are, whose shape and
    precision are those of ``like``. Norms with weights give other values, which the self-test
    notices."""
    made: Tensor = norm.forward(key.to(like.dtype).reshape(like.shape))
    return made.reshape(key.shape).to(key.dtype)


def _is_rotary(module: nn.Module) -> bool:
    """Return whether the module rotates queries and keys."""
    return isinstance(module, RotaryEmbeddingBase) or _takes_positions_and_keys(
        type(module).forward
    )


@cache
def _takes_positions_and_keys(forward: Callable[..., Any]) -> bool:
    """Return whether a class's ``forward`` is called as rotary embeddings' are: some of vLLM's
    classes share no base class with the others."""
    return list(inspect.signature(forward).parameters)[1:4] == ["positions", "query", "key"]
