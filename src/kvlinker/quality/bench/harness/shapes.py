"""Makes models of a given shape with random weights: for speed, which does not depend on what a
model has learnt."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import in_own_thread
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.settings import WeightFormat

VOCABULARY = 32_000
"""The tokens of the vocabulary, as Llama 2 has them."""

CONTEXT_WINDOW = 65_536
"""The most tokens of a prompt with its answer."""

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 4, "hidden": 256, "heads": 8, "kv_heads": 4, "ffn": 704},
    "285m": {"layers": 24, "hidden": 1024, "heads": 16, "kv_heads": 8, "ffn": 2816},
    "285m-hybrid": {
        "layers": 24,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 2816,
        "state_heads": 8,
    },
    "215m-experts": {
        "layers": 4,
        "hidden": 1024,
        "heads": 16,
        "kv_heads": 8,
        "ffn": 512,
        "experts": 32,
        "active_experts": 4,
    },
    "8b": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336},
}

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n"
    "{% endfor %}[assistant]"
)


@in_own_thread
def random_model(
    shape: str, *, dtype: torch.dtype, device: torch.device, weights: WeightFormat = "auto"
) -> LoadedModel:
    """Make a Llama of the named shape with random weights and a tokenizer of one token per byte,
    for the engine; of one with ``state_heads``, a hybrid, and of one with ``experts``, a mixture.

    Raises InvalidRequestError for an unknown shape.
    """
    return prepare_model(
        random_transformer(shape, dtype=dtype, device=device),
        byte_tokenizer(VOCABULARY),
        weights=weights,
    )


def random_transformer(shape: str, *, dtype: torch.dtype, device: torch.device) -> Any:
    """Make a Llama of the named shape with random weights, always the same, as transformers has it;
    of one with ``state_heads``, a Qwen3.5 with a gated delta rule in three layers of four, and of
    one with ``experts``, a Qwen3 whose layers all have experts.

    Raises InvalidRequestError for an unknown shape.
    """
    if shape not in SHAPES:
        raise InvalidRequestError(
            f"Unknown shape {shape!r}; known are {', '.join(SHAPES)}.", param="shape"
        )
    size = SHAPES[shape]
    common: dict[str, Any] = {
        "num_hidden_layers": size["layers"],
        "hidden_size": size["hidden"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv_heads"],
        "intermediate_size": size["ffn"],
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXT_WINDOW,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": True,
    }
    config: PreTrainedConfig
    if "state_heads" in size:
        config = Qwen3_5TextConfig(
            **common,
            head_dim=size["hidden"] // size["heads"],
            linear_num_key_heads=size["state_heads"] // 2,
            linear_num_value_heads=size["state_heads"],
        )
    elif "experts" in size:
        config = Qwen3MoeConfig(
            **common,
            head_dim=size["hidden"] // size["heads"],
            moe_intermediate_size=size["ffn"],
            num_experts=size["experts"],
            num_experts_per_tok=size["active_experts"],
        )
    else:
        config = LlamaConfig(**common)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def byte_tokenizer(vocabulary: int = 258) -> Any:
    """Make a byte-level tokenizer without merges: one token per byte, so that texts of any length
    are easy to make.

    Ids 0 to 255 are bytes, 256 begins and 257 ends a sequence. Ids from there to ``vocabulary`` are
    in no encoded text, but have a text: servers send no event for a token without one, and a random
    model answers with any id.
    """
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    symbols += [f"w{index}" for index in range(len(symbols), vocabulary)]
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )
