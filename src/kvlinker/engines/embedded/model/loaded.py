"""Describes a model that the engine can run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kvlinker.engines.contract.cost import CostModel, kv_bytes_per_token
from kvlinker.engines.contract.model_files import (
    sampling_defaults,
)
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.embedded.model.rotary import RotatedKeys


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
        return RotatedKeys(tuple(shape.rotary for shape in self.layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of one token's KV over all layers."""
        return kv_bytes_per_token(self.layers, self.dtype)
