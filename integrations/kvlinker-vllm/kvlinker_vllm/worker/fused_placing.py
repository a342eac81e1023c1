"""Places chunks by a kernel that gathers, rotates and writes a few layers at once: in Triton on
GPUs, in native code on CPUs."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvlinker.engines.contract.placing import KeyValue, PlacingKernel, Rotation, Rounding
from kvlinker.engines.gpu import has_kernels
from kvlinker.engines.native.placing import native_placing
from kvlinker.store import ChunkKV, LayerKV
from kvlinker_vllm.adapter import AttentionLayer, BoundModel
from kvlinker_vllm.worker.layers import (
    ChunkPart,
    GroupParts,
    Launch,
    layer_launches,
)

logger = logging.getLogger("kvlinker.vllm.worker.fused_placing")

LAYERS_AT_ONCE = 4
"""The layers of one launch: few, so that the first ones are there soon."""

CHECKED_TOKENS = 40
"""The tokens that are placed in both ways before the kernel is trusted."""

IN_ORDER = 16
"""The number of checked tokens in adjacent slots, for which kernels have code of their own."""

LARGEST_ERROR = {torch.float32: 1e-5}
ROUGH_ERROR = 1e-2
"""The largest relative error from vLLM's own rotary kernel, which may round more often in 16
bits."""

ROUNDED_ERROR = 6e-2
"""The same where caches are in fp8, in which few numbers are rounded the other way."""


@dataclass(frozen=True, slots=True)
class _Alike:
    """A few layers of one ``group`` whose heads are rotated alike, and their caches [blocks,
    block_size, heads, dim]."""

    layers: tuple[int, ...]
    group: int
    rotation: Rotation | None
    caches: tuple[KeyValue, ...]
    rounding: Rounding | None


class _FoundCache(NamedTuple):
    """Where a layer's cache keeps keys and values, [blocks, block_size, heads, dim] each, and the
    form of fp8 in which they are there, as bytes; None if they are as they were computed."""

    cache: KeyValue
    form: torch.dtype | None


class FusedPlacing:
    """Places chunks, by one launch for a few layers that are rotated alike.

    It writes into vLLM's caches by itself: where these lie, and in which form of fp8, is found by
    looking for what vLLM's own update writes.
    """

    def __init__(
        self, bound: BoundModel, layers: Sequence[AttentionLayer], kernel: PlacingKernel
    ) -> None:
        """Raises LookupError if a cache or a rotary embedding is of a kind that is not known."""
        if bound.dtype not in kernel.dtypes:
            raise LookupError(f"the model computes in {bound.dtype}")
        if bound.has_rounded_cache and not kernel.forms:
            raise LookupError("the KV cache is in fp8")
        self._bound = bound
        self._kernel = kernel
        forms = kernel.forms if bound.has_rounded_cache else (None,)
        found = [_cache_of(layer, bound, forms) for layer in layers]
        self.form = found[0].form
        """The form of fp8 that caches have, if any."""

        alike: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, layer in enumerate(layers):
            alike[id(layer.rotary), layer.heads, layer.key_dim, layer.group].append(index)
        self._groups = sorted(
            (
                self._alike(indices[begin : begin + LAYERS_AT_ONCE], layers, found)
                for indices in alike.values()
                for begin in range(0, len(indices), LAYERS_AT_ONCE)
            ),
            key=lambda group: group.layers,
        )

    @staticmethod
    def _alike(
        indices: Sequence[int], layers: Sequence[AttentionLayer], found: Sequence[_FoundCache]
    ) -> _Alike:
        form, rounding = found[indices[0]].form, None
        if form is not None:
            rounding = Rounding(form, [layers[index].scales for index in indices])
        return _Alike(
            tuple(indices),
            layers[indices[0]].group,
            _rotation(layers[indices[0]].rotary),
            tuple(found[index].cache for index in indices),
            rounding,
        )

    def caches(self, group: int) -> Iterator[KeyValue]:
        """Yield the caches of a group's layers, in any order."""
        for alike in self._groups:
            if alike.group == group:
                yield from alike.caches

    def launches(self, parts: GroupParts) -> Iterator[Launch]:
        """Yield the writing of all parts into the KV cache. Their memory has to be kept until the
        device has read it."""
        tokens = [self._tokens(own) if own else None for own in parts]
        for alike in self._groups:
            places = tokens[alike.group]
            if places is not None:
                own = parts[alike.group]
                yield Launch(alike.layers, partial(self._place, alike, own, places))

    def _tokens(self, parts: Sequence[ChunkPart]) -> Tensor:
        """Return, for each token of the parts, the part's number, its row in the chunk, its
        position and its slot: [4, tokens]."""
        numbers = [np.full(part.last - part.first, index) for index, part in enumerate(parts)]
        rows = [np.arange(part.first, part.last) for part in parts]
        known = torch.from_numpy(np.stack([np.concatenate(numbers), np.concatenate(rows)]))
        places = [torch.stack([part.positions, part.slots]) for part in parts]
        return torch.cat([self._bound.to_device(known), torch.cat(places, dim=1)])

    def _place(self, group: _Alike, parts: Sequence[ChunkPart], tokens: Tensor) -> None:
        sources = [
            [(layer.key, layer.value) for layer in (part.kv.layers[index] for part in parts)]
            for index in group.layers
        ]
        self._kernel.place(sources, group.caches, tokens, group.rotation, rounding=group.rounding)


def fused_placing(
    bound: BoundModel, layers: Sequence[AttentionLayer], *, native: bool = True
) -> FusedPlacing | None:
    """Return the placing by one kernel, once it has placed the same as layer by layer; None if
    it does not, and the log says why. Without ``native``, no code is compiled for CPUs. Uses the
    first blocks of the KV cache, and leaves zeros there."""
    kernel = _kernel_for(bound.device, native=native)
    if kernel is None:
        return None
    try:
        placing = FusedPlacing(bound, layers, kernel)
        _require_same(placing, bound, layers)
    except Exception as error:  # whatever the compiler or the driver raises
        logger.info("Chunks are placed layer by layer: %s: %s.", type(error).__name__, error)
        return None
    return placing


def _kernel_for(device: torch.device, *, native: bool) -> PlacingKernel | None:
    if has_kernels(device):
        from kvlinker.engines.gpu.launching import TritonPlacing

        return TritonPlacing()
    return native_placing() if native and device.type == "cpu" else None


def _require_same(
    placing: FusedPlacing, bound: BoundModel, layers: Sequence[AttentionLayer]
) -> None:
    """Raises LookupError unless some tokens are placed as layer by layer."""
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, dim: int) -> Tensor:
        size = heads, CHECKED_TOKENS + 5, dim
        made = torch.randn(size, generator=generator).to(bound.dtype)
        return made if bound.device.type == "cpu" else made.pin_memory()

    kv = ChunkKV(
        tuple(
            LayerKV(random(each.heads, each.key_dim), random(each.heads, each.value_dim))
            for each in layers
        )
    )
    farthest = min(1000, bound.max_model_len - 1)
    positions = torch.arange(CHECKED_TOKENS) * farthest // CHECKED_TOKENS
    rest = torch.randperm(CHECKED_TOKENS - IN_ORDER, generator=generator)
    slots = torch.cat([torch.arange(IN_ORDER), IN_ORDER + rest])
    part = ChunkPart(
        kv, 3, 3 + CHECKED_TOKENS, 0, *bound.to_device(torch.stack([positions, slots]))
    )
    for group in range(len(bound.groups)):  # one by one, since they share memory
        parts = [[part] if other == group else [] for other in range(len(bound.groups))]
        caches = [tensor for pair in placing.caches(group) for tensor in pair]
        expected = _place_and_read(layer_launches(layers, parts), caches, placing.form)
        ours = _place_and_read(placing.launches(parts), caches, placing.form)
        errors = [
            float((one - other).norm() / other.norm())
            for one, other in zip(ours, expected, strict=True)
        ]
        allowed = ROUNDED_ERROR if placing.form else LARGEST_ERROR.get(bound.dtype, ROUGH_ERROR)
        if not (error := float(np.max(errors))) <= allowed:  # NaN, if any is
            raise LookupError(f"the kernel places something else, by {error:.1e}")


def _place_and_read(
    launches: Iterator[Launch], caches: Sequence[Tensor], form: torch.dtype | None
) -> list[Tensor]:
    """Return the KV that is placed in the first slots of caches, and leave zeros there."""
    for _, work in launches:
        work()
    found = [_numbers(cache[_where(cache)], form) for cache in caches]
    for cache in caches:
        cache[_where(cache)] = 0
    return found


def _rotation(rotary: Any) -> Rotation | None:
    """Return the tables of vLLM's rotary embedding. Raises LookupError if it has none."""
    if rotary is None:
        return None
    table = getattr(rotary, "cos_sin_cache", None)
    if table is None or not hasattr(rotary, "is_neox_style"):
        raise LookupError(f"{type(rotary).__name__} has no table of angles")
    cos, sin = table.chunk(2, dim=-1)
    return Rotation(cos, sin, interleaved=not rotary.is_neox_style)


def _cache_of(
    layer: AttentionLayer, bound: BoundModel, forms: Collection[torch.dtype | None]
) -> _FoundCache:
    """Return where the layer's cache keeps keys and values, and in which of these ``forms``.

    Backends lay it out differently: a few random tokens are written by vLLM's own update, and
    looked for. Raises LookupError if they are not found.
    """
    key, value = (
        torch.randn(CHECKED_TOKENS, layer.heads, dim).to(bound.device, bound.dtype)
        for dim in (layer.key_dim, layer.value_dim)
    )
    layer.write(key, value, torch.arange(CHECKED_TOKENS, device=bound.device))
    for cache, form in product(layer.cache_views(), forms):
        if form is not None:
            cache = cache[0].view(torch.uint8), cache[1].view(torch.uint8)
        if all(map(partial(_holds, form), cache, (key, value), layer.scales)):
            return _FoundCache(cache, form)
    raise LookupError(f"the KV cache of {layer.name} is laid out in another way")


def _holds(form: torch.dtype | None, cache: Tensor, written: Tensor, scale: Tensor) -> bool:
    """Return whether a cache begins with the written KV, up to rounding."""
    found = cache[_where(cache)]
    if form is None:
        return torch.equal(found, written)
    error = _numbers(found, form) * scale - written.float()
    return bool(error.norm() < 0.1 * written.float().norm())


def _numbers(found: Tensor, form: torch.dtype | None) -> Tensor:
    """Return the numbers in a cache."""
    return found.float() if form is None else found.contiguous().view(form).float()


def _where(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the first slots of a cache [blocks, block_size, heads, dim]."""
    slots = torch.arange(CHECKED_TOKENS, device=cache.device)
    return slots // cache.shape[1], slots % cache.shape[1]
