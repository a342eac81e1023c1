"""Finds the attention layers of a model in vLLM by watching a pass, and places KV into their
caches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.store import ChunkKV, LayerKV
from kvlinker.store.chunk_kv import changed
from kvlinker_vllm.adapter import AttentionLayer, BoundModel, rotate, watch_attention


def trace_layers(bound: BoundModel) -> tuple[AttentionLayer, ...]:
    """Return the attention layers, with their rotary embeddings, in the order in which the model
    calls them; there is no code per model family.

    Raises UnsupportedModelError if keys are changed between rotary embedding and attention, or
    layers are not called exactly once each.
    """
    by_name = {layer.name: layer for layer in bound.layers}
    layers: list[AttentionLayer] = []
    pending: list[tuple[Any, int]] = []  # and how many values of each token it rotates

    def rotated(module: Any, positions: Tensor, key: Tensor | None) -> None:
        if positions.ndim != 1 or key is None:
            raise UnsupportedModelError(
                "The model's rotary embedding is not one of positions in a text."
            )
        pending.append((module, key.numel() // len(positions)))

    def attended(name: str, *_: Tensor) -> None:
        if name not in by_name or len(pending) > 1:
            raise UnsupportedModelError(
                f"The model's attention layer {name} is not one that kvlinker can place KV in."
            )
        attention = by_name[name]
        module, width = pending.pop() if pending else (None, None)
        if width not in (None, attention.heads * attention.key_dim):
            raise UnsupportedModelError(
                f"The model rotates a part of the keys of its attention layer {name} before it"
                " makes keys of it, as where latents are expanded, which kvlinker does not link in"
                " vLLM: if VLLM_MLA_DISABLE is set, leave it out, else serve the model with"
                " kvlinker's own engine (--engine embedded)."
            )
        layers.append(replace(attention, rotary=module))

    with watch_attention(bound, rotated=rotated, attended=attended):
        bound.trace()
    if sorted(layer.name for layer in layers) != sorted(by_name):
        raise UnsupportedModelError(
            "The model does not call each of its attention layers once per pass."
        )
    if all(layer.rotary is None for layer in layers):
        raise UnsupportedModelError(
            f"{type(bound.model).__name__} applies no rotary embedding in vLLM: with other"
            " positions, KV cannot move."
        )
    return tuple(layers)


def own_heads(layers: Sequence[AttentionLayer], dtype: torch.dtype, kv: ChunkKV) -> ChunkKV:
    """Return this worker's heads of a chunk, which has those of all workers.

    Raises ValueError, with why, for a chunk that does not fit the model, which computes in
    ``dtype``.
    """
    if len(kv.layers) != len(layers):
        raise ValueError(f"it has {len(kv.layers)} layers, the model has {len(layers)}")

    def own(index: int, layer: LayerKV) -> LayerKV:
        attention = layers[index]
        found = layer.key.shape[0], layer.key.shape[2], layer.value.shape[2]
        expected = attention.total_heads, attention.key_dim, attention.value_dim
        if found != expected:
            raise ValueError(f"its heads are {found}, the model's {expected}")
        if layer.key.dtype != dtype:
            raise ValueError(f"it is {layer.key.dtype}, the model {dtype}")
        if attention.heads == attention.total_heads:
            return layer
        heads = slice(attention.first_head, attention.first_head + attention.heads)
        return LayerKV(layer.key[heads], layer.value[heads])

    return changed(kv, own)


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """The tokens [first, last) of a chunk, with their places in the request and in the KV cache."""

    kv: ChunkKV
    """This worker's heads of the chunk."""

    first: int
    last: int

    begin: int
    """The prompt's position of token ``first``."""

    positions: Tensor
    """The positions that the keys are rotated to: [last - first]."""

    slots: Tensor
    """The slots of the tokens in the KV cache of one group of layers: [last - first]."""


GroupParts = Sequence[Sequence[ChunkPart]]
"""The chunk parts to place, by group of layers. A group with windows may have fewer than others."""


class Launch(NamedTuple):
    """A piece of placing."""

    layers: Sequence[int]
    work: Callable[[], object]


def place(layers: Sequence[AttentionLayer], parts: GroupParts) -> None:
    """Write all parts into the KV cache, layer by layer."""
    for _, work in layer_launches(layers, parts):
        work()


def layer_launches(layers: Sequence[AttentionLayer], parts: GroupParts) -> Iterator[Launch]:
    """Yield the writing of all parts into the KV cache, layer by layer."""
    slots = {
        number: torch.cat([part.slots for part in group])
        for number, group in enumerate(parts)
        if group
    }

    def work(index: int) -> None:
        layer = layers[index]
        layer.write(*placed_kv(layer, index, parts[layer.group]), slots[layer.group])

    for index, layer in enumerate(layers):
        if layer.group in slots:
            yield Launch((index,), partial(work, index))


def placed_kv(
    layer: AttentionLayer, index: int, parts: Sequence[ChunkPart]
) -> tuple[Tensor, Tensor]:
    """Return the parts' keys, rotated by the model's own arithmetic, and values in the ``layer``
    number ``index``: [all tokens, heads, dim] on the model's device."""
    values = [part.kv.layers[index].value for part in parts]
    return _placed_keys(layer, index, parts), _gather(values, parts)


def query_operands(layer: AttentionLayer, index: int, parts: Sequence[ChunkPart]) -> Tensor:
    """Return the tensors that queries are multiplied by, of the parts in the ``layer`` number
    ``index``, rotated: [all tokens, heads, dim]. Values are copied only where they are among
    them."""
    if layer.keeps_latents:
        return layer.query_operand(*placed_kv(layer, index, parts))
    return _placed_keys(layer, index, parts)


def _placed_keys(layer: AttentionLayer, index: int, parts: Sequence[ChunkPart]) -> Tensor:
    keys = _gather([part.kv.layers[index].key for part in parts], parts)
    if layer.rotary is None:
        return keys
    return rotate(layer.rotary, torch.cat([part.positions for part in parts]), keys)


def _gather(chunks: Sequence[Tensor], parts: Sequence[ChunkPart]) -> Tensor:
    """Gather all parts from their ``chunks`` [heads, tokens, dim], as [all tokens, heads, dim].

    A chunk is copied to another device as it lies in memory, which waits for nothing if that is
    pinned, and is cut and transposed there.
    """
    heads, _, dim = chunks[0].shape
    tokens = sum(part.last - part.first for part in parts)
    device = parts[0].slots.device
    gathered = torch.empty((tokens, heads, dim), dtype=chunks[0].dtype, device=device)
    begin = 0
    for chunk, part in zip(chunks, parts, strict=True):
        end = begin + part.last - part.first
        copied = chunk.to(device, non_blocking=True)
        gathered[begin:end].copy_(copied[:, part.first : part.last].transpose(0, 1))
        begin = end
    return gathered
