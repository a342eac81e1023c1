"""Writes Llama models as GGUF files, which llama.cpp reads, and quantises them with llama.cpp's own
function."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlinker.base.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

ARCHITECTURE = "llama"

_OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_file(model: Path, folder: Path, quantization: str | None) -> Path:
    """Return the model as a GGUF file in ``folder``, written where it is not there yet.

    ``model``: a folder that transformers wrote. ``quantization``: None for the weights as they are,
    or what follows ``LLAMA_FTYPE_MOSTLY_`` among llama.cpp's names. Raises ModelLoadError for a
    model that is no plain Llama.
    """
    written = folder / f"{quantization or 'unquantized'}.gguf"
    if not written.exists():
        partial = written.with_suffix(".partial")
        if quantization is None:
            _write(model, partial)
        else:
            _quantize(llama_file(model, folder, None), partial, quantization)
        os.replace(partial, written)
    return written


def _write(model: Path, path: Path) -> None:
    import gguf

    config = json.loads((model / "config.json").read_text())
    _require_plain_llama(config)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("none")  # prompts are token ids
    for name, tensor in _tensors(model):
        renamed = _llama_name(name)
        if "attn_q" in renamed or "attn_k" in renamed:
            tensor = _interleave(tensor, heads if "attn_q" in renamed else kv_heads)
        array, kind = _array(tensor)
        writer.add_tensor(renamed, array, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _require_plain_llama(config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]["rope_type"] if config["model_type"] == "llama" else None
    if rope != "default" or config.get("attention_bias") or config.get("mlp_bias"):
        raise ModelLoadError(
            "Only Llamas without biases and with plain rotary embeddings are written for llama.cpp."
        )


def _tensors(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                yield name, file.get_tensor(name)


def _llama_name(name: str) -> str:
    """Return llama.cpp's name of a tensor that transformers names so."""
    stem = name.removesuffix(".weight")
    if stem in _OF_MODEL:
        return f"{_OF_MODEL[stem]}.weight"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_OF_LAYER[part]}.weight"


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of a projection, [heads * dim, hidden], so that the two of each rotated pair
    are neighbours.

    transformers rotates row i of a head with row i + dim / 2, llama.cpp row 2i with row 2i + 1.
    """
    halves = weight.view(heads, 2, -1, weight.shape[1])  # [heads, half, dim / 2, hidden]
    return halves.transpose(1, 2).reshape(weight.shape)


def _array(tensor: torch.Tensor) -> tuple[np.ndarray[Any, Any], str]:
    """Return a tensor as GGUF stores it, with the name of the type: vectors in float32, matrices as
    they are."""
    import torch

    if tensor.ndim == 1:
        return tensor.float().numpy(), "F32"
    kind = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[tensor.dtype]
    contiguous = tensor.contiguous()
    return (contiguous.view(torch.uint8) if kind == "BF16" else contiguous).numpy(), kind


def _quantize(path: Path, quantized: Path, quantization: str) -> None:
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{quantization}")
    if llama_cpp.llama_model_quantize(bytes(path), bytes(quantized), ctypes.byref(options)):
        raise ModelLoadError(f"llama.cpp cannot quantise {path.name} to {quantization}.")
