"""Models that people use, at a small width, with chat templates of their kinds and synthetic
tokenizers.

What is scaled down are width, depth and vocabulary; heads that share keys, rotary embeddings,
windows, layers without positions, norms and tied embeddings are those of the published
configurations. The chat templates are short ones in the same frame, and tokenizers are trained on
the spot: both of the originals have licences of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)

from tests.toy_tokenizers import byte_level

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PHI4_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0] * 6,
    "long_factor": [1.0 + index for index in range(6)],
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V3_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

HERMES_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\\n<tools>' }}{% for tool in tools %}{{ tool | tojson }}{%"
    " endfor %}{{ '</tools>\\nCall as <tool_call>{\"name\": …}</tool_call><|im_end|>\\n' }}{%"
    " endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
THINKING = (
    CHATML + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
QWEN3 = HERMES_TOOLS + THINKING
SMOLLM3 = (
    HERMES_TOOLS.replace("if tools", "set tools = xml_tools or tools %}{% if tools") + THINKING
)
LLAMA3 = (
    "{{ bos_token }}{% if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% for"
    " tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}{% for m in"
    " messages %}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}{{"
    " '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>'"
    " }}{% endfor %}{% if add_generation_prompt %}{{"
    " '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}"
    "{{ m.content | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
PHI4 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OLMO2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '\\n' }}{%"
    " endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
DEEPSEEK_V3 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}"
)
GRANITE4 = (
    "{% for m in messages %}"
    "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content + '<|end_of_text|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
LFM2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content +"
    " '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
JAMBA = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|' + m.role + '|> ' + m.content + '<|endofmessage|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
GLM5 = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
DEEPSEEK: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": DEEPSEEK_V3_ROPE,
    "max_position_embeddings": 163_840,
}
DEEPSEEK_TOKENS = ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
INDEX = {"index_n_heads": 8, "index_head_dim": 32, "index_topk": 16, "head_dim": 16}


@dataclass(frozen=True)
class FieldModel:
    """A published model, scaled down."""

    kind: str
    """Its ``model_type`` in transformers."""

    config: dict[str, Any]
    """What its configuration has beside the usual."""

    template: str
    """A chat template in its frame."""

    tokens: tuple[str, ...]
    """The special tokens of its chat template."""

    reasons: bool = False
    """True if its chat template has reasoning."""

    with_images: bool = False
    """True if it has a part for images, which is small here."""

    def save(self, folder: Path) -> None:
        """Write configuration, random weights, tokenizer and chat template as a published model's
        files."""
        tokenizer = self._tokenizer()
        width = {
            "hidden_size": 16 * self.config.get("num_attention_heads", 4),
            "intermediate_size": 96,
            "vocab_size": len(tokenizer),
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.1,
        }
        torch.manual_seed(0)
        sizes: dict[str, Any] = width | {"num_hidden_layers": 4, "rms_norm_eps": 1e-6} | self.config
        made: Any = AutoModelForCausalLM
        if self.with_images:
            made, seen = AutoModelForImageTextToText, {"depth": 1, "hidden_size": 32}
            sizes = {"text_config": sizes, "vision_config": seen | {"intermediate_size": 32}}
        config = AutoConfig.for_model(self.kind, **sizes)
        made.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def _tokenizer(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(byte_level().backend_tokenizer.to_str())
        backend.add_special_tokens([AddedToken(token, special=True) for token in self.tokens])
        return PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token=self.tokens[-1],
            pad_token="<pad>",
            chat_template=self.template,
        )


def _qwen3(heads: int, **more: Any) -> FieldModel:
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
    }
    rope = {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "max_position_embeddings": 40_960,
    }
    return FieldModel(
        "qwen3",
        config | rope | more,
        QWEN3,
        ("<|im_start|>", "<|endoftext|>", "<|im_end|>"),
        reasons=True,
    )


def _llama(heads: int, shared: int) -> FieldModel:
    config = {
        "num_attention_heads": heads,
        "num_key_value_heads": heads // shared,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": LLAMA3_ROPE,
        "max_position_embeddings": 131_072,
    }
    tokens = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    return FieldModel("llama", config, LLAMA3, tokens)


FIELD_MODELS = {
    "Qwen3 0.6B": _qwen3(4),
    "Qwen3 1.7B": _qwen3(4, num_hidden_layers=3),
    "Qwen3 4B": _qwen3(8, hidden_size=96),
    "Llama 3.2 1B": _llama(8, 4),
    "Llama 3.2 3B": _llama(6, 3),
    "SmolLM3 3B": FieldModel(
        "smollm3",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "num_hidden_layers": 8,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
            "max_position_embeddings": 65_536,
        },
        SMOLLM3,
        ("<|im_start|>", "<|im_end|>"),
        reasons=True,
    ),
    "Gemma 3 1B": FieldModel(
        "gemma3_text",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "num_hidden_layers": 7,
            "sliding_window": 64,
            "rope_parameters": GEMMA3_ROPE,
            "max_position_embeddings": 32_768,
        },
        GEMMA3,
        ("<start_of_turn>", "<end_of_turn>"),
    ),
    "Phi-4-mini": FieldModel(
        "phi3",
        {
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_parameters": PHI4_ROPE,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131_072,
        },
        PHI4,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"),
    ),
    "OLMo 2 1B": FieldModel(
        "olmo2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            "max_position_embeddings": 4096,
        },
        OLMO2,
        ("<|endoftext|>",),
    ),
    "DeepSeek V3": FieldModel("deepseek_v3", DEEPSEEK, DEEPSEEK_V3, DEEPSEEK_TOKENS),
    "DeepSeek V3.2": FieldModel("deepseek_v32", DEEPSEEK | INDEX, DEEPSEEK_V3, DEEPSEEK_TOKENS),
    "GLM-5.3-Flash": FieldModel(
        "glm5_next",
        DEEPSEEK
        | INDEX
        | {
            "qk_rope_head_dim": 0,
            "qk_head_dim": 32,
            "head_dim": 0,
            "rope_parameters": None,
            "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "indexer_types": ["full"] * 4,
            "index_kpool": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "max_position_embeddings": 1_048_576,
        },
        GLM5,
        ("<|user|>", "<|assistant|>", "<|endoftext|>"),
        with_images=True,
    ),
    "Qwen3.5 0.8B": FieldModel(
        "qwen3_5_text",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
            "num_hidden_layers": 8,
            "tie_word_embeddings": True,
            "max_position_embeddings": 262_144,
        },
        QWEN3,
        ("<|im_start|>", "<|endoftext|>", "<|im_end|>"),
        reasons=True,
    ),
    "Granite 4.0 H 1B": FieldModel(
        "granitemoehybrid",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "position_embedding_type": "nope",
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 32,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "tie_word_embeddings": True,
            "max_position_embeddings": 131_072,
        },
        GRANITE4,
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ),
    "LFM2 1.2B": FieldModel(
        "lfm2",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "layer_types": ["conv", "conv", "full_attention"] * 2,
            "num_hidden_layers": 6,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128_000,
        },
        LFM2,
        ("<|startoftext|>", "<|im_start|>", "<|im_end|>"),
    ),
    "Jamba Mini 1.7": FieldModel(
        "jamba",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 262_144,
        },
        JAMBA,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|endofmessage|>"),
    ),
    "Falcon Mamba 7B": FieldModel(
        "falcon_mamba",
        {"state_size": 16, "conv_kernel": 4, "tie_word_embeddings": False},
        CHATML,
        ("<|im_start|>", "<|im_end|>"),
    ),
}
"""Of each model, what linking depends on; ``docs/models.md`` lists them."""
