"""Facts about a model that vLLM runs: from vLLM's configuration, and the fingerprint of its
files."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from kvlinker.base.errors import ModelLoadError
from kvlinker.engines.contract.cost import (
    AttentionShape,
    CostModel,
    count_weights,
    kv_bytes_per_token,
)
from kvlinker.engines.contract.model_files import (
    RECOMMENDED,
    fingerprint_of_files,
    fingerprint_with,
    model_folder,
    read_tokenizer,
)
from kvlinker.engines.contract.model_place import weight_files
from kvlinker.settings import Settings

logger = logging.getLogger("kvlinker.vllm.frontend.model_facts")


@dataclass(frozen=True, slots=True)
class ExpandedShape(AttentionShape):
    """One layer's attention over keys and values that are made of one latent and one key of each
    token: a head's have ``expanded`` values."""

    expanded: int

    @property
    def operations_per_pair(self) -> int:
        return 2 * self.query_heads * self.expanded


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts that kvlinker needs about a model that vLLM runs."""

    tokenizer: Any
    fingerprint: str

    vocabulary: int
    """Token ids go from 0 to this, exclusive."""

    layers: tuple[AttentionShape, ...]
    cost: CostModel

    kv_bytes_per_token: int
    """The bytes of one token's KV over all layers."""


def read_facts(vllm_config: Any, settings: Settings, tokenizer: Any) -> ModelFacts:
    """Return the facts of the model of ``vllm_config``, whose files vLLM has on the disk by now.

    No weights are loaded; their files are hashed unless that was done before. Raises ModelLoadError
    if there are none.
    """
    model = vllm_config.model_config
    folder = model_folder(
        model.model, revision=model.revision, cache_dir=vllm_config.load_config.download_dir
    )
    began = time.monotonic()
    name = fingerprint_of_files(folder, model.dtype, state_dir=settings.state_dir)
    if name is None:
        raise ModelLoadError(
            f"{folder} has no config.json next to weight files; chunks are named by both."
        )
    logger.info("The model's files are identified (%.1f s).", time.monotonic() - began)
    changes = kv_changes(vllm_config)
    if changes:
        name = fingerprint_with(name, json.dumps(changes, sort_keys=True, default=str))
    layers = (_shape(model),) * model.get_total_num_hidden_layers()
    weights = (
        _weights(model)
        or sum(path.stat().st_size for path in weight_files(folder)) // model.dtype.itemsize
    )
    return ModelFacts(
        tokenizer=tokenizer,
        fingerprint=name,
        vocabulary=model.get_vocab_size(),
        layers=layers,
        cost=CostModel(weights, layers),
        kv_bytes_per_token=kv_bytes_per_token(layers, model.dtype),
    )


def _shape(model: Any) -> AttentionShape:
    """Return one layer's attention. vLLM computes prompts over keys and values to which it has
    expanded latents."""
    heads, head_dim = model.model_arch_config.total_num_attention_heads, model.get_head_size()
    if not model.use_mla:
        return AttentionShape(heads, model.get_total_num_kv_heads(), head_dim, head_dim)
    text = model.hf_text_config
    expanded = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    return ExpandedShape(heads, 1, text.qk_rope_head_dim, text.kv_lora_rank, expanded)


def tokenizer_of(vllm_config: Any, settings: Settings) -> Any:
    """Read the tokenizer that vLLM uses. Raises ModelLoadError."""
    model = vllm_config.model_config
    options = {"revision": model.tokenizer_revision} if model.tokenizer_revision else {}
    return read_tokenizer(settings.model_copy(update={"model": model.tokenizer}), **options)


def sampling_defaults_of(vllm_config: Any) -> dict[str, float]:
    """Return the sampling parameters that vLLM takes for those that requests leave out, by name."""
    defaults = vllm_config.model_config.get_diff_sampling_param()
    return {name: defaults[name] for name in RECOMMENDED if name in defaults}


def kv_changes(vllm_config: Any) -> dict[str, Any]:
    """Return by name whatever has vLLM compute other KV than the embedded engine would from the
    same files."""
    model, cached_as = vllm_config.model_config, vllm_config.cache_config.cache_dtype
    changes = {
        "hf_overrides": model.hf_overrides,
        "kv_cache_dtype": None if cached_as == "auto" else cached_as,
        "quantization": model.quantization,
        "rope": _rope_change(model),
    }
    return {name: change for name, change in changes.items() if change}


def _rope_change(model: Any) -> str | None:
    """Return the rotary embedding of vLLM's where it is not the one of short prompts, which the
    embedded engine keeps to: one that depends on the prompt's length is fixed in vLLM by the
    longest prompt that it takes."""
    config = model.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = {parameters.get("rope_type")} | {
        own.get("rope_type") for own in parameters.values() if isinstance(own, dict)
    }
    if "dynamic" in kinds:
        return "dynamic"
    original = getattr(config, "original_max_position_embeddings", None)
    original = original or parameters.get("original_max_position_embeddings") or model.max_model_len
    return "longrope" if "longrope" in kinds and model.max_model_len > original else None


def _weights(model: Any) -> int | None:
    """Count the weights of an empty model of transformers'; None if it has none for this
    configuration."""
    try:
        with torch.device("meta"):
            return count_weights(
                AutoModelForCausalLM.from_config(
                    model.hf_config, trust_remote_code=model.trust_remote_code
                )
            )
    except Exception:  # transformers raises whatever it meets, and only an estimate depends on it
        return None
