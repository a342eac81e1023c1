"""What a model in vLLM does with its keys, found out by watching a pass: no code per model family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from kvlinker.errors import UnsupportedModelError
from kvlinker.vllm.adapter import AttentionLayer, BoundModel, rotate, watched


@dataclass(frozen=True, slots=True)
class LinkedLayer:
    """An attention layer, and the module that gives its keys their rotary embedding, if one does."""

    attention: AttentionLayer
    rotary: Any | None

    def rotated(self, key: Tensor, positions: Tensor) -> Tensor:
        """``key`` [tokens, heads, head_dim] rotated to ``positions`` [tokens] by the model's own arithmetic. May change
        ``key``."""
        return key if self.rotary is None else rotate(self.rotary, positions, key)


def trace_layers(bound: BoundModel) -> tuple[LinkedLayer, ...]:
    """The layers in the order in which the model calls them.

    Raises UnsupportedModelError where keys do not go from rotary embedding to attention as they are, or layers are
    called otherwise than once each.
    """
    by_name = {layer.name: layer for layer in bound.layers}
    layers: list[LinkedLayer] = []
    pending: list[Any] = []

    def rotated(module: Any, positions: Tensor, key: Tensor | None) -> None:
        if positions.ndim != 1 or key is None:
            raise UnsupportedModelError("The model's rotary embedding is not one of positions in a text.")
        pending.append(module)

    def attended(name: str, *_: Tensor) -> None:
        if name not in by_name or len(pending) > 1:
            raise UnsupportedModelError(f"The model's attention layer {name} is not one that kvlinker can place KV in.")
        layers.append(LinkedLayer(by_name[name], pending.pop() if pending else None))

    with watched(bound, rotated=rotated, attended=attended):
        bound.trace()
    if sorted(layer.attention.name for layer in layers) != sorted(by_name):
        raise UnsupportedModelError("The model does not call each of its attention layers once per pass.")
    return tuple(layers)


def check_chunk(layers: Sequence[LinkedLayer], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Why chunk KV with keys of these shapes, [kv_heads, tokens, head_dim] each, does not fit the model; None if it
    does."""
    if len(shapes) != len(layers):
        return f"it has {len(shapes)} layers, the model has {len(layers)}"
    for layer, shape in zip(layers, shapes, strict=True):
        expected = (layer.attention.total_heads, layer.attention.head_dim)
        if (shape[0], shape[2]) != expected:
            return f"its heads are {(shape[0], shape[2])}, the model's {expected}"
    return None
