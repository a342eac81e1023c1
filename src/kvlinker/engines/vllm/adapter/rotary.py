"""Finds the rotary embeddings of vLLM's models, runs them, and watches what goes through them and
into attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.deepseek_scaling_rope import (
    DeepseekScalingRotaryEmbedding,
)

from kvlinker.engines.vllm.adapter.attention_layers import AttentionLayer
from kvlinker.engines.vllm.adapter.bound_model import BoundModel
from kvlinker.engines.vllm.adapter.transformers_modules import watched_modules


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
    rotated: Tensor = kernel(positions, query, given)[1]
    return rotated.view_as(key)


@contextmanager
def watched(bound: BoundModel, *, rotated: Any, attended: Any) -> Iterator[None]:
    """Have passes by the modules call back, as long as the context lasts.

    ``rotated(module, positions, key)`` gets keys [tokens, heads * dim] before their rotary
    embedding, ``attended(layer_name, query, key, value)`` what attention takes. Neither is called
    for layers that attend to another one's KV.
    """

    def before_rotary(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        positions, _, key = (
            *args,
            *(kwargs[name] for name in ("positions", "query", "key") if name in kwargs),
        )[:3]
        if key is not None:
            rotated(module, positions, key)

    def before_attention(
        layer: AttentionLayer, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        attended(layer.name, *layer.called_with(args, kwargs))

    rotaries = [module for module in bound.model.modules() if _is_rotary(module)]
    handles = [
        module.register_forward_pre_hook(before_rotary, with_kwargs=True) for module in rotaries
    ]
    handles += [
        layer.module.register_forward_pre_hook(partial(before_attention, layer), with_kwargs=True)
        for layer in bound.layers
    ]
    try:
        with watched_modules(bound.model, bound.layers, rotated=rotated, attended=attended):
            yield
    finally:
        for handle in handles:
            handle.remove()


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
