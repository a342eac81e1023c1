"""What kvlinker has to know of a model that vLLM runs: its tokenizer, its fingerprint, and what computing it costs."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from blake3 import blake3
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

from kvlinker.config import Settings
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.engine.cost import CostModel
from kvlinker.engine.model_files import (
    choose_device,
    choose_dtype,
    fingerprint,
    read_config,
    read_model,
    read_tokenizer,
)
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FINGERPRINTS = "fingerprints.json"
CHANGES_KV = ("hf_overrides", "kv_cache_dtype", "quantization", "revision")
"""Options of vLLM's with which KV is not what the model alone makes of its tokens."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """``dtype``: what weights and KV are in. ``vocabulary``: token ids go from 0 to this, exclusive."""

    tokenizer: Any
    fingerprint: str
    dtype: torch.dtype
    vocabulary: int
    layers: tuple[LayerShape, ...]
    cost: CostModel

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token's KV takes, over all layers."""
        return sum(layer.values_per_token for layer in self.layers) * self.dtype.itemsize


def read_facts(settings: Settings) -> ModelFacts:
    """Of ``settings.model``. Reads all weights, unless their fingerprint is known from another time.

    Raises ModelLoadError where the model or its tokenizer cannot be loaded.
    """
    dtype = choose_dtype(settings.dtype, choose_device("auto"))
    config = read_config(settings)
    layers = _layers(config.get_text_config())
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=settings.trust_remote_code)
    return ModelFacts(
        tokenizer=read_tokenizer(settings),
        fingerprint=_with_options(_known_fingerprint(settings, dtype), settings.vllm_options),
        dtype=dtype,
        vocabulary=int(empty.get_input_embeddings().num_embeddings),
        layers=layers,
        cost=CostModel(empty, layers),
    )


def _layers(config: Any) -> tuple[LayerShape, ...]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    shape = LayerShape(heads, getattr(config, "num_key_value_heads", None) or heads, head_dim, head_dim, rotary=None)
    return (shape,) * int(config.num_hidden_layers)


def _with_options(model: str, options: Mapping[str, Any]) -> str:
    """The same as the embedded engine's, unless vLLM makes other KV of the model."""
    changes = {name: options[name] for name in CHANGES_KV if options.get(name)}
    return blake3(f"{model} {json.dumps(changes, sort_keys=True)}".encode()).hexdigest() if changes else model


def _known_fingerprint(settings: Settings, dtype: torch.dtype) -> str:
    """The weights' fingerprint, from a file in the state directory if it was computed for the same files before."""
    place = settings.state_dir / FINGERPRINTS
    name = _files_name(settings, dtype)
    try:
        known = json.loads(place.read_text())
        if isinstance(known[name], str):
            return str(known[name])
    except (OSError, ValueError, KeyError, TypeError):
        known = {}
    on_cpu = settings.model_copy(update={"device": "cpu", "dtype": str(dtype).removeprefix("torch."), "threads": None})
    model, _ = read_model(on_cpu)
    known = (known if isinstance(known, dict) else {}) | {name: fingerprint(model)}
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(place, json.dumps(known).encode())
    except OSError as error:
        logger.warning("The model's fingerprint is computed again next time: %s", error)
    return str(known[name])


def _files_name(settings: Settings, dtype: torch.dtype) -> str:
    """Names all that the fingerprint depends on, but the weights by their files' sizes and times alone."""
    folder = Path(settings.model)
    if not folder.is_dir():
        folder = Path(cached_file(settings.model, "config.json")).parent
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir())
    parts = [str(folder.resolve()), files, str(dtype), transformers.__version__]
    return blake3(json.dumps(parts).encode()).hexdigest()
