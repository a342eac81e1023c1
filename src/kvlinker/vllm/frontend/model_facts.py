"""Facts about a model that vLLM runs: tokenizer, fingerprint, and the cost of computing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3
from transformers import AutoModelForCausalLM

from kvlinker.config import Settings
from kvlinker.engine.cost import AttentionShape, CostModel, kv_bytes_per_token
from kvlinker.engine.model_files import (
    choose_device,
    choose_dtype,
    known_fingerprint,
    read_config,
    read_generation_config,
    read_tokenizer,
    sampling_defaults,
)

CHANGES_KV = ("hf_overrides", "kv_cache_dtype", "quantization", "revision")
"""vLLM's options that change the KV which a model computes for its tokens."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that kvlinker needs about a model that vLLM runs."""

    tokenizer: Any
    fingerprint: str

    dtype: torch.dtype
    """The dtype of weights and KV."""

    vocabulary: int
    """Token ids go from 0 to this, exclusive."""

    layers: tuple[AttentionShape, ...]
    cost: CostModel

    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """The sampling parameters that the model's authors recommend, by name."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's KV over all layers."""
        return kv_bytes_per_token(self.layers, self.dtype)


def read_facts(settings: Settings) -> ModelFacts:
    """Read the facts of ``settings.model``: all its weights, too, unless their fingerprint is known from another time.

    Raises ModelLoadError where the model or its tokenizer cannot be loaded.
    """
    dtype = choose_dtype(settings.dtype, choose_device("auto"))
    config = read_config(settings)
    layers = _attention_shapes(config.get_text_config())
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return ModelFacts(
        tokenizer=read_tokenizer(settings),
        fingerprint=_with_options(known_fingerprint(settings, dtype), settings.vllm_options),
        dtype=dtype,
        vocabulary=int(empty.get_input_embeddings().num_embeddings),
        layers=layers,
        cost=CostModel(empty, layers),
        sampling_defaults=sampling_defaults(read_generation_config(settings)),
    )


def _attention_shapes(config: Any) -> tuple[AttentionShape, ...]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return (AttentionShape(heads, kv_heads, head_dim, head_dim),) * int(config.num_hidden_layers)


def _with_options(model: str, options: Mapping[str, Any]) -> str:
    """Return the embedded engine's fingerprint, extended by the options with which vLLM computes other KV."""
    changes = {name: options[name] for name in CHANGES_KV if options.get(name)}
    return blake3(f"{model} {json.dumps(changes, sort_keys=True)}".encode()).hexdigest() if changes else model
