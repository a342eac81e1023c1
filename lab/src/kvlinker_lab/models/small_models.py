"""Small random models of every causal language model class of transformers, made from its
configuration's defaults at small sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

KINDS = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

NOT_MADE = {
    "gemma3n": "needs timm",
    "gemma4_assistant": "needs the model that it drafts for",
    "gemma4_unified_assistant": "needs the model that it drafts for",
    "musicgen": "needs the configurations of its parts",
    "musicgen_melody": "needs the configurations of its parts",
}
"""The classes of which no model is made here, and why."""

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.1,
    "sliding_window": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "d_model": 64,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 4,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 16,
    "image_size": 32,
    "patch_size": 16,
}
"""The sizes that any configuration takes which has them; of layers there are more where some kind
comes later."""

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "d_model": 128,
    "n_embd": 128,
    "rotary_dim": 16,
    "mamba_d_head": 32,
    "sliding_window": 40,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "qk_head_dim": 128,
    "indexer_head_dim": 32,
    "max_position_embeddings": 2048,
}
"""The sizes that vLLM's attention on CPUs takes, where they are others."""

NORMS_VARY = 0.2
"""The deviation of norms' weights, which begin alike: with these, a norm that comes behind rotation
would look as if it came before it."""

GRANITE: dict[str, Any] = {"attention_multiplier": 0.125}
WIDE_OWN: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 32},
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoeshared": GRANITE,
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "zamba": {"attention_hidden_size": 256, "attention_head_dim": 64},
}
"""The values that vLLM expects of configurations, as released models have them: sizes that
transformers has another name for, and a scale of attention that does not magnify its rounding."""

LATENT = {"num_key_value_heads": 4, "head_dim": 8, "qk_head_dim": 24}
INDEX = {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 6}
FULL_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
}
WIDE_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
}
EXPERIMENTAL = {
    **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32},
    **{
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    },
    **{
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}

OWN: dict[str, dict[str, Any]] = {
    "axk1": LATENT,
    "axk2": LATENT | INDEX,
    "bamba": {
        "attn_layer_indices": [1, 3],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": FULL_ROPE},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "n_heads": 4,
        "n_layers": 4,
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "deepseek_v32": LATENT | INDEX,
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_hidden_layers": 10, "num_kv_shared_layers": 4, "intermediate_size": 96},
    "gemma4_text": {"num_experts": None},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT | INDEX | {"indexer_types": ["full", "shared", "full", "shared"]},
    "hy_v4": LATENT | INDEX | {"indexer_types": ["full", "shared", "full", "shared"]},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LATENT
    | {
        "num_experts_per_token": 2,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4": {"text_config": {"num_experts_per_tok": 1}},
    "llama4_text": {"num_experts_per_tok": 1},
    "longcat_flash": {"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2, "ffn_hidden_size": 96}
    | LATENT,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minicpm3": LATENT,
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "index_n_heads": 2,
        "index_block_size": 8,
        "index_topk_blocks": 3,
    },
    "qwen4_exp_text": EXPERIMENTAL,
    "qwen4_exp": {"text_config": EXPERIMENTAL},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [32, 32]},
    "xlm": {"emb_dim": 64, "n_layers": 2, "n_heads": 4},
    "youtu": LATENT,
    "zamba": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_hidden_layers": 9,
        "num_key_value_heads": 4,
    },
    "zamba2": {"layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Sizes that have to fit others of the same configuration."""


def small_config(kind: str, *, wide: bool = False) -> PretrainedConfig:
    """Return the configuration of this name at the sizes above, whole models' parts too; ``wide``:
    at those that vLLM takes."""
    made = CONFIG_MAPPING[kind]
    own = OWN.get(kind, {}) | (WIDE_OWN.get(kind, {}) if wide else {})
    return made(**_shrunk(made(), own, wide))


def _shrunk(full: PretrainedConfig, own: dict[str, Any], wide: bool) -> dict[str, Any]:
    fields = full.to_dict()
    small = SMALL | WIDE if wide else SMALL
    sizes = {name: value for name, value in small.items() if name in fields}
    if wide:
        own = {name: WIDE.get(name, value) for name, value in own.items()}
        own |= {"head_dim": WIDE["qk_rope_head_dim"]} if "qk_head_dim" in own else {}
        own |= {"rope_parameters": WIDE_ROPE} if own.get("rope_parameters") is FULL_ROPE else {}
    for part in full.sub_configs:
        if isinstance(getattr(full, part, None), PretrainedConfig):
            sizes[part] = _shrunk(getattr(full, part), own.get(part, {}), wide)
    kinds = getattr(full, "layer_types", None)
    if kinds and "num_hidden_layers" in sizes and "layer_types" not in own:
        first = max(kinds.index(kind) for kind in set(kinds)) + 1
        sizes["num_hidden_layers"] = max(sizes["num_hidden_layers"], first)
    return sizes | {name: value for name, value in own.items() if name not in full.sub_configs}


def small_model(kind: str, *, wide: bool = False) -> Any:
    """Return a random model of this kind in fp32, with norms that weigh as trained ones do;
    ``wide``: as vLLM takes it. Raises whatever transformers does where it cannot be made."""
    torch.manual_seed(0)
    config = small_config(kind, wide=wide)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    generator = torch.Generator().manual_seed(0)
    for part in model.modules():
        if "norm" in type(part).__name__.lower():
            for weight in part.parameters(recurse=False):
                weight.data += NORMS_VARY * torch.randn(weight.shape, generator=generator)
        if isinstance(part, nn.Conv1d) and not part.weight.any():
            nn.init.normal_(part.weight, std=0.5, generator=generator)  # else none would see it
    return model
