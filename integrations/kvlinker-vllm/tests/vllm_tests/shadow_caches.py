"""Lets kvlinker's kernel place chunks in vLLM on CPUs, to whose caches no kernel for GPUs can
write: it writes to a shadow of each cache, laid out as on GPUs, and vLLM gets what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlinker_vllm.adapter import AttentionLayer
from kvlinker_vllm.worker import fused_placing
from kvlinker_vllm.worker.fused_placing import FusedPlacing
from kvlinker_vllm.worker.layers import ChunkPart

_WRITE, _PLACE = AttentionLayer.write, FusedPlacing._place


class _Shadow:
    """Keys and values [blocks, block_size, heads, head_dim] beside a layer's own cache."""

    def __init__(self, layer: AttentionLayer) -> None:
        blocks, heads, block_size, _ = layer.module.kv_cache.shape
        self.layer = layer
        self.keys, self.values = (
            torch.zeros(blocks, block_size, heads, dim, dtype=layer.module.kv_cache.dtype)
            for dim in (layer.key_dim, layer.value_dim)
        )

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        self.keys.flatten(0, 1)[slots] = key
        self.values.flatten(0, 1)[slots] = value

    def hand_over(self, slots: Tensor) -> None:
        """Have vLLM write what lies in these slots here."""
        key, value = self.keys.flatten(0, 1)[slots], self.values.flatten(0, 1)[slots]
        _WRITE(self.layer, key, value, slots)


_shadows: dict[int, _Shadow] = {}
"""By the address of their keys."""


def _shadow_of(layer: AttentionLayer) -> _Shadow:
    for shadow in _shadows.values():
        if shadow.layer is layer:
            return shadow
    shadow = _Shadow(layer)
    _shadows[shadow.keys.data_ptr()] = shadow
    return shadow


def _write(layer: AttentionLayer, key: Tensor, value: Tensor, slots: Tensor) -> None:
    _WRITE(layer, key, value, slots)
    _shadow_of(layer).write(key, value, slots)


def _cache_views(layer: AttentionLayer) -> Iterator[tuple[Tensor, Tensor]]:
    shadow = _shadow_of(layer)
    yield shadow.keys, shadow.values


def _place(placing: FusedPlacing, group: Any, parts: Sequence[ChunkPart], tokens: Tensor) -> None:
    _PLACE(placing, group, parts, tokens)
    for keys, _ in group.caches:
        _shadows[keys.data_ptr()].hand_over(tokens[3])


def install() -> None:
    """Have workers of engines that start from now on place chunks by the kernel."""
    replaced: list[tuple[Any, str, Any]] = [
        (AttentionLayer, "write", _write),
        (AttentionLayer, "cache_views", _cache_views),
        (FusedPlacing, "_place", _place),
        (fused_placing, "has_kernels", lambda device: True),
    ]
    for owner, name, ours in replaced:
        setattr(owner, name, ours)
