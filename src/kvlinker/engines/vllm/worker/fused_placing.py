"""Places chunks in all layers by one launch of a kernel, where the worker's model is on a GPU."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvlinker.engines.gpu import has_kernels
from kvlinker.engines.vllm.adapter import AttentionLayer, BoundModel
from kvlinker.engines.vllm.worker.layers import AttentionModules, ChunkPart, place
from kvlinker.store import ChunkKV, LayerKV

if TYPE_CHECKING:
    from kvlinker.engines.gpu.launching import KeyValue, Rotation

logger = logging.getLogger(__name__)

CHECKED_TOKENS = 24
"""The tokens that are placed in both ways before the kernel is trusted."""

LARGEST_ERROR = {torch.float32: 1e-5}
ROUGH_ERROR = 1e-2
"""The largest relative error from vLLM's own rotary kernel, which may round more often in 16
bits."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """Layers whose heads are rotated alike, and their caches [blocks, block_size, heads, dim]."""

    layers: tuple[int, ...]
    rotation: Rotation | None
    caches: tuple[KeyValue, ...]
    first_head: int


class FusedPlacing:
    """Places chunks from pinned memory, by one launch for all layers that are rotated alike.

    It writes into vLLM's caches by itself: where these lie is found by looking for what vLLM's own
    update writes.
    """

    def __init__(self, bound: BoundModel, layers: Sequence[AttentionModules]) -> None:
        """Raises LookupError where a cache or a rotary embedding is of a kind that is not known."""
        from kvlinker.engines.gpu.launching import DTYPES

        if bound.dtype not in DTYPES or bound.has_rounded_cache:
            raise LookupError("the KV cache has another precision than the model")
        self._device = bound.device
        self._running: deque[tuple[torch.Event, list[ChunkKV]]] = deque()
        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, layer in enumerate(layers):
            attention = layer.attention
            alike[id(layer.rotary), attention.heads, attention.head_dim].append(index)
        self._groups = [
            _Alike(
                tuple(indices),
                _rotation(layers[indices[0]].rotary),
                tuple(_cache_of(layers[index].attention, bound) for index in indices),
                layers[indices[0]].attention.first_head,
            )
            for indices in alike.values()
        ]

    @property
    def groups(self) -> int:
        """The number of launches."""
        return len(self._groups)

    def caches(self) -> Iterator[KeyValue]:
        """Yield the caches of all layers, in any order."""
        for group in self._groups:
            yield from group.caches

    def place(self, parts: Sequence[ChunkPart]) -> None:
        """Write all parts into the KV cache. Their memory is kept until the device has read it."""
        from kvlinker.engines.gpu.launching import on_device, place_kv

        if not parts:
            return
        numbers = [np.full(part.last - part.first, index) for index, part in enumerate(parts)]
        rows = [np.arange(part.first, part.last) for part in parts]
        known = on_device(np.stack([np.concatenate(numbers), np.concatenate(rows)]), self._device)
        places = [torch.stack([part.positions, part.slots]) for part in parts]
        tokens = torch.cat([known, torch.cat(places, dim=1)])
        for group in self._groups:
            kept = [[part.kv.layers[index] for part in parts] for index in group.layers]
            sources = [[(layer.key, layer.value) for layer in layers] for layers in kept]
            place_kv(sources, group.caches, tokens, group.rotation, first_head=group.first_head)
        if self._device.type != "cpu":
            self._hold([part.kv for part in parts], torch.Event(self._device))

    def _hold(self, kvs: list[ChunkKV], event: torch.Event) -> None:
        """Keep the chunks' memory until the device has come to this point."""
        event.record()
        self._running.append((event, kvs))
        while self._running and self._running[0][0].query():
            self._running.popleft()


def fused_placing(bound: BoundModel, layers: Sequence[AttentionModules]) -> FusedPlacing | None:
    """Return the placing by one kernel, once it has placed the same as layer by layer; None where
    it does not, and the log says why. Uses the first blocks of the KV cache, and leaves zeros
    there."""
    if not has_kernels(bound.device):
        return None
    try:
        placing = FusedPlacing(bound, layers)
        _require_same(placing, bound, layers)
    except Exception as error:  # whatever the compiler or the driver raises
        logger.info("Chunks are placed layer by layer: %s: %s.", type(error).__name__, error)
        return None
    return placing


def _require_same(
    placing: FusedPlacing, bound: BoundModel, layers: Sequence[AttentionModules]
) -> None:
    """Raises LookupError unless some tokens are placed as layer by layer."""
    generator = torch.Generator().manual_seed(0)

    def random(layer: AttentionLayer) -> Tensor:
        size = layer.total_heads, CHECKED_TOKENS + 5, layer.head_dim
        heads = torch.randn(size, generator=generator).to(bound.dtype)
        return heads if bound.device.type == "cpu" else heads.pin_memory()

    attentions = [layer.attention for layer in layers]
    kv = ChunkKV(tuple(LayerKV(random(each), random(each)) for each in attentions))
    farthest = min(1000, bound.max_model_len - 1)
    positions = torch.arange(CHECKED_TOKENS) * farthest // CHECKED_TOKENS
    slots = torch.randperm(CHECKED_TOKENS, generator=generator)
    part = ChunkPart(
        kv, 3, 3 + CHECKED_TOKENS, 0, *bound.to_device(torch.stack([positions, slots]))
    )
    caches = [tensor for pair in placing.caches() for tensor in pair]

    def placed(by: Callable[[Sequence[ChunkPart]], None]) -> list[Tensor]:
        by([part])
        found = [cache[_where(cache)].float() for cache in caches]
        for cache in caches:
            cache[_where(cache)] = 0
        return found

    expected, ours = placed(partial(place, layers)), placed(placing.place)
    error = max(
        float((one - other).norm() / other.norm())
        for one, other in zip(ours, expected, strict=True)
    )
    if not error <= LARGEST_ERROR.get(bound.dtype, ROUGH_ERROR):
        raise LookupError(f"the kernel places something else, by {error:.1e}")


def _rotation(rotary: Any) -> Rotation | None:
    """Return the tables of vLLM's rotary embedding. Raises LookupError where it has none."""
    from kvlinker.engines.gpu.launching import Rotation

    if rotary is None:
        return None
    table = getattr(rotary, "cos_sin_cache", None)
    if table is None or not hasattr(rotary, "is_neox_style"):
        raise LookupError(f"{type(rotary).__name__} has no table of angles")
    cos, sin = table.chunk(2, dim=-1)
    return Rotation(cos, sin, interleaved=not rotary.is_neox_style)


def _cache_of(layer: AttentionLayer, bound: BoundModel) -> KeyValue:
    """Return where the layer's cache keeps keys and values: [blocks, block_size, heads, dim] each.

    Backends lay it out differently: a few random tokens are written by vLLM's own update, and
    looked for. Raises LookupError where they are not found.
    """
    size = CHECKED_TOKENS, layer.heads, layer.head_dim
    key, value = torch.randn(2, *size).to(bound.device, bound.dtype)
    layer.write(key, value, torch.arange(CHECKED_TOKENS, device=bound.device))
    for keys, values in layer.cache_views():
        found = keys[_where(keys)], values[_where(values)]
        if torch.equal(found[0], key) and torch.equal(found[1], value):
            return keys, values
    raise LookupError(f"the KV cache of {layer.name} is laid out in another way")


def _where(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the first slots of a cache [blocks, block_size, heads, dim]."""
    slots = torch.arange(CHECKED_TOKENS, device=cache.device)
    return slots // cache.shape[1], slots % cache.shape[1]
