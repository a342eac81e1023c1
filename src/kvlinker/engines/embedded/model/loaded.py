"""Describes a model that the engine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvlinker.engines.contract.cost import CostModel, kv_bytes_per_token
from kvlinker.engines.contract.model_files import (
    sampling_defaults,
)
from kvlinker.engines.embedded.model.anatomy import LayerShape, keeping
from kvlinker.store.chunk_kv import LayerKV


@dataclass(frozen=True, slots=True)
class RotatedKeys:
    """The resident form of chunks: keys rotated for the chunk's own positions 0, 1, …, in layers
    with rotary embedding; latents beside the shared key."""

    layers: tuple[LayerShape, ...]
    """Those that keep keys and values."""

    def resident(self, index: int, layer: LayerKV) -> LayerKV:
        """Return the layer with rotated keys."""
        return self._turned(index, layer, back=False)

    def computed(self, index: int, layer: LayerKV) -> LayerKV:
        """Return the layer without the keys' rotation, but for rounding."""
        return self._turned(index, layer, back=True)

    def _turned(self, index: int, layer: LayerKV, *, back: bool) -> LayerKV:
        shape = self.layers[index]
        turned = layer
        if shape.latents is not None and not back:
            turned = LayerKV.of_joined(layer.joined.clone(), shape.key_dim)
        if shape.rotary is None:
            return turned
        cos, sin = shape.rotary.tables(layer.key.shape[1])
        if back:
            square = cos[:1] ** 2  # of the factor by which some models scale what they rotate
            cos, sin = cos / square, -sin / square
        if turned is layer:
            key = torch.empty_like(layer.key, memory_format=torch.contiguous_format)
            turned = LayerKV(key, layer.value)
        device = turned.key.device
        shape.rotary.rotate(layer.key, cos.to(device), sin.to(device), out=turned.key)
        return turned


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model that is ready for the runner: its attention is kvlinker's."""

    model: Any
    tokenizer: Any
    layers: tuple[LayerShape, ...]
    cost: CostModel
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    context_window: int
    eos_token_ids: frozenset[int]

    @property
    def sampling_defaults(self) -> dict[str, float]:
        """The sampling parameters that the model's authors recommend, by name."""
        return sampling_defaults(self.model.generation_config)

    @property
    def vocabulary(self) -> int:
        """The size of the vocabulary: token ids are 0 to this, exclusive."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @property
    def resident_form(self) -> RotatedKeys:
        """The form in which chunks are attended to."""
        return RotatedKeys(keeping(self.layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's KV over all layers."""
        return kv_bytes_per_token(self.layers, self.dtype)
