"""Finds the rotary embeddings of vLLM's models, runs them, and watches what goes through them and
into attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from torch import Tensor, nn
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvlinker.engines.vllm.adapter.bound_model import BoundModel
from kvlinker.engines.vllm.adapter.transformers_modules import watched_modules


def rotate(rotary: Any, positions: Tensor, key: Tensor) -> Tensor:
    """Return ``key`` [tokens, heads, head_dim] with the model's rotary embedding of ``positions``
    [tokens], by its kernel.

    Where the model is compiled, calling the module would run plain PyTorch, which takes many times
    as long. May change ``key``.
    """
    kernel = getattr(rotary, f"forward_{key.device.type}", rotary)
    query = key[:, 0].clone()  # some take no key without one
    rotated: Tensor = kernel(positions, query, key.flatten(1))[1]
    return rotated.view_as(key)


@contextmanager
def watched(bound: BoundModel, *, rotated: Any, attended: Any) -> Iterator[None]:
    """Have passes by the modules call back, as long as the context lasts.

    ``rotated(module, positions, key)`` gets keys [tokens, heads * head_dim] before their rotary
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

    def before_attention(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        query, key, value = (
            *args,
            *(kwargs[name] for name in ("query", "key", "value") if name in kwargs),
        )[:3]
        if module.layer_name not in bound.borrowing:
            attended(module.layer_name, query, key, value)

    rotaries = [module for module in bound.model.modules() if _is_rotary(module)]
    handles = [
        module.register_forward_pre_hook(before_rotary, with_kwargs=True) for module in rotaries
    ]
    handles += [
        layer.module.register_forward_pre_hook(before_attention, with_kwargs=True)
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
