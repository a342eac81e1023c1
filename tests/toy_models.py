"""Tiny random models of many families, for tests that compare with a model's own forward pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.settings import WeightFormat

VOCABULARY = 300
WINDOW = 48

BASE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
HEADS_OF_16 = {"head_dim": 16}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}

WINDOWS_IN_TWO_OF_THREE = ["sliding_attention", "sliding_attention", "full_attention"] * 2
MSCALE_ROPE = YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.0}
DYNAMIC_ROPE = {
    "rope_type": "dynamic",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 256,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 256,
}
WIDE_LONG_ROPE = LONG_ROPE | {
    "short_factor": [1.0 + i / 20 for i in range(16)],
    "long_factor": [2.0 + i / 2 for i in range(16)],
}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama3-rope": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "yarn": ("llama", {"rope_parameters": YARN_ROPE}),
    "dynamic-rope": ("llama", {"rope_parameters": DYNAMIC_ROPE, "max_position_embeddings": 256}),
    "longrope": ("phi3", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 256}),
    "qwen3": ("qwen3", HEADS_OF_16),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": WINDOW}),
    "gemma2-softcap": (
        "gemma2",
        {**HEADS_OF_16, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("gemma3_text", {**HEADS_OF_16, "sliding_window": WINDOW, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "gpt_neox-partial": ("gpt_neox", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "gpt_oss-sinks": ("gpt_oss", {**HEADS_OF_16, "sliding_window": WINDOW, "num_local_experts": 4}),
    "mixtral-moe": ("mixtral", {"num_local_experts": 4}),
    "cohere2-interleaved-nope": ("cohere2", {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    "deepseek_v3-latents-interleaved": ("deepseek_v3", LATENT | {"rope_parameters": MSCALE_ROPE}),
    "deepseek_v2-latents-interleaved": ("deepseek_v2", LATENT | {"q_lora_rank": None}),
    "minicpm3-latents": ("minicpm3", LATENT),
    "gemma4-shared-two-sizes": (
        "gemma4_text",
        HEADS_OF_16
        | {"global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": WINDOW}
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY, "layer_types": WINDOWS_IN_TWO_OF_THREE},
    ),
    "gemma3n-shared": (
        "gemma3n_text",
        HEADS_OF_16
        | {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8}
        | {"vocab_size_per_layer_input": VOCABULARY, "layer_types": WINDOWS_IN_TWO_OF_THREE}
        | {"sliding_window": WINDOW, "activation_sparsity_pattern": [0.9] + [0.0] * 5},
    ),
    "llama4-interleaved-nope": (
        "llama4_text",
        HEADS_OF_16
        | {"num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 96}
        | {"attention_chunk_size": 256, "floor_scale": 300},
    ),
    "diffllama-two-attentions": ("diffllama", {"attention_dropout": 0.0}),
    "gptj-interleaved-written-out": ("gptj", {"rotary_dim": 8}),
    "falcon-one-key-written-out": ("falcon", {"multi_query": True, "alibi": False}),
    "longcat-latents-interleaved": (
        "longcat_flash",
        LATENT
        | {"num_layers": 2, "num_hidden_layers": 4, "moe_topk": 2}
        | {"zero_expert_num": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 32}
        | {"head_dim": 8},
    ),
}

FOR_VLLM: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4-two-sizes": (
        "gemma4_text",
        FAMILIES["gemma4-shared-two-sizes"][1] | {"num_kv_shared_layers": 0, "global_head_dim": 64},
    ),
    "llama4-without-norms": (
        "llama4_text",
        FAMILIES["llama4-interleaved-nope"][1] | {"use_qk_norm": False},
    ),
    "nanochat-norms-behind": ("nanochat", {}),
    "olmo2": ("olmo2", {}),
    "phi-partial": ("phi", {"partial_rotary_factor": 0.5}),
    "seed_oss": ("seed_oss", HEADS_OF_16),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
}
"""Families that are something else to vLLM: heads of several sizes in one group, and models that it
runs by transformers' modules."""


DELTA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
MAMBA = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "num_local_experts": 0,
}
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next-states": (
        "qwen3_next",
        DELTA
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"shared_expert_intermediate_size": 32},
    ),
    "qwen3_5-states": ("qwen3_5_text", DELTA),
    "kimi-states-latents": (
        "kimi_linear",
        LATENT
        | {"num_hidden_layers": 4, "linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 24}
        | {"num_experts": 4, "num_experts_per_token": 2, "layer_types": DELTA["layer_types"]},
    ),
    "granite-states-nope": ("granitemoehybrid", MAMBA),
    "falcon_h1-states-beside": (
        "falcon_h1",
        {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 12}
        | {"head_dim": 16},
    ),
    "lfm2-convolutions": (
        "lfm2",
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe-convolutions": (
        "lfm2_moe",
        {"layer_types": ["conv", "conv", "full_attention"], "num_experts": 4}
        | {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1},
    ),
    "jamba-states-nope": (
        "jamba",
        {"attn_layer_period": 3, "attn_layer_offset": 1, "num_hidden_layers": 4}
        | {"mamba_d_state": 12, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "minimax-states": (
        "minimax",
        {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
        | {"head_dim": 16, "block_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "zamba-states-of-heads": (
        "zamba",
        {"num_hidden_layers": 4, "attention_hidden_size": 128, "attention_head_dim": 32}
        | {"num_key_value_heads": 4, "mamba_d_state": 12, "n_mamba_heads": 2}
        | {"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    ),
    "zamba2-states-behind": (
        "zamba2",
        {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2}
        | {"hybrid_layer_ids": [1, 3], "mamba_d_state": 12, "n_mamba_heads": 8},
    ),
}
"""The families whose layers keep states, which remember for hundreds of tokens, and attend."""

STATES_ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba-alone": ("mamba", {"state_size": 12}),
    "falcon_mamba-alone": ("falcon_mamba", {"state_size": 12}),
    "mamba2-alone": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 12, "chunk_size": 16},
    ),
}
"""The families all of whose layers keep states."""


HALF_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
INDEX = LATENT | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 9, "head_dim": 8}
SHARED_PICKS = {"indexer_types": ["full", "shared", "full", "shared"], "num_hidden_layers": 4}
INDEXED: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32-picks": ("deepseek_v32", INDEX | {"rope_parameters": MSCALE_ROPE}),
    "glm_moe_dsa-shared-picks": ("glm_moe_dsa", INDEX | SHARED_PICKS),
    "axk2-picks": ("axk2", INDEX),
    "hy_v4-picks-streams-sinks": ("hy_v4", INDEX | SHARED_PICKS),
    "minimax_m3-blocks": (
        "minimax_m3_vl_text",
        {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]}
        | {"mlp_layer_types": ["dense", "sparse", "sparse"], "head_dim": 16, "rotary_dim": 8}
        | {"index_n_heads": 2, "index_head_dim": 16, "index_block_size": 5, "index_topk_blocks": 3}
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 96}
        | {"shared_intermediate_size": 32},
    ),
    "qwen4_exp-blocks-states": (
        "qwen4_exp_text",
        DELTA
        | {"layer_types": ["linear_attention", "indexed_attention"] * 2}
        | {"hc_count": 2, "hc_lowrank": 8, "num_experts": 4, "num_experts_per_tok": 2}
        | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
        | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
        | {"indexer_budget": 12, "indexer_compress_ratio": 4, "rope_parameters": HALF_ROPE},
    ),
}
"""The families whose indexers pick the tokens that queries see: far fewer than chunks have."""

TEXT = BASE | LATENT | {"qk_rope_head_dim": 0, "head_dim": 0, "qk_head_dim": 16}
NO_IMAGES = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "depth": 1}
WITH_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm5_next-pools-states": (
        "glm5_next",
        {
            "text_config": TEXT
            | {"num_hidden_layers": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2}
            | {"mlp_layer_types": ["dense", "sparse"] * 2, "hc_mult": 2, "hc_sinkhorn_iters": 3}
            | {"linear_head_dim": 8, "linear_num_heads": 4, "indexer_types": ["full"] * 4}
            | {"index_n_heads": 4, "index_head_dim": 16, "index_topk": 12, "index_kpool": 3},
            "vision_config": NO_IMAGES,
        },
    ),
    "kimi_k25-latents": (
        "kimi_k25",
        {"text_config": BASE | LATENT | {"head_dim": 8}, "vision_config": NO_IMAGES},
    ),
}
"""Families that transformers has with a part for images alone: here they read text."""


SIZED = "gemma4-two-sizes", "llama4-without-norms"
WIDE_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64}
WIDE: dict[str, dict[str, Any]] = {
    "longrope": {"hidden_size": 128, "rope_parameters": WIDE_LONG_ROPE},
    "gpt_neox-partial": {"hidden_size": 128},
    "gptj-interleaved-written-out": {"hidden_size": 128, "num_key_value_heads": 4},
    **{family: {"hidden_size": 128} for family in FOR_VLLM if family not in SIZED},
    "deepseek_v3-latents-interleaved": WIDE_LATENT
    | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},  # as checkpoints say it
    "deepseek_v2-latents-interleaved": WIDE_LATENT,
}
"""The families whose heads are as wide as other sizes say: these sizes for heads of 32, and for
latents as wide as vLLM takes them on CPUs."""


SLOW = -6, -2
"""The range of weights ``A_log`` by which a state fades by a thousandth to a tenth a token."""


def tiny_model(family: str, **changes: Any) -> Any:
    """A transformers model of the family in fp32, with norms and sinks that are not trivially 1 or
    0."""
    families = FAMILIES | FOR_VLLM | HYBRIDS | STATES_ALONE | INDEXED | WITH_IMAGES
    kind, own = families[family]
    if changes.get("head_dim") == 32:
        changes = changes | WIDE.get(family, {})
    sizes = own if family in WITH_IMAGES else BASE | own | changes
    config = AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    made = AutoModelForImageTextToText if family in WITH_IMAGES else AutoModelForCausalLM
    model = made.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.uniform_(*SLOW, generator=generator)
            elif "compress" in name:  # pools are no plain means
                weight.normal_(generator=generator)
            elif weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
            elif "embed" in name or "lm_head" in name:
                weight *= 4  # so that neither the greedy choice nor the differences drown
    return model


@cache
def loaded_model(family: str, *, weights: WeightFormat = "auto", **changes: Any) -> LoadedModel:
    """The family's tiny model as the engine runs it, shared by all tests: they must not change
    it."""
    return prepare_model(tiny_model(family, **changes), byte_tokenizer(), weights=weights)
