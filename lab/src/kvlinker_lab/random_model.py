"""Writes GGUF files of large models with random weights: what does a size take, where no weights of
that size are at hand?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer


@dataclass(frozen=True, slots=True)
class Layout:
    """A real model's sizes."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    head_dim: int
    tied: bool

    def tensors(self, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Return the names of all tensors, and their shapes: [outputs, inputs] of a matrix."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        yield "token_embd.weight", (vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in {
                "attn_norm.weight": (self.hidden,),
                "attn_q.weight": (queries, self.hidden),
                "attn_k.weight": (keys, self.hidden),
                "attn_v.weight": (keys, self.hidden),
                **self._beside_projections(queries, keys),
                "attn_output.weight": (self.hidden, queries),
                "ffn_norm.weight": (self.hidden,),
                "ffn_gate.weight": (self.ffn, self.hidden),
                "ffn_up.weight": (self.ffn, self.hidden),
                "ffn_down.weight": (self.hidden, self.ffn),
            }.items():
                yield f"blk.{layer}.{name}", shape
        yield "output_norm.weight", (self.hidden,)
        if not self.tied:
            yield "output.weight", (vocabulary, self.hidden)

    def _beside_projections(self, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
        if self.architecture == "qwen2":
            return {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
        return {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}


LAYOUTS = {
    "qwen2.5-3b": Layout("qwen2", 36, 2048, 16, 2, 11008, 128, tied=True),
    "qwen3-8b": Layout("qwen3", 36, 4096, 32, 8, 12288, 128, tied=False),
}
"""As the configurations of these models on the hub say."""

Weights = Literal["Q4_0", "Q4_K_M", "Q8_0", "BF16"]


def random_model(
    file: Annotated[Path, typer.Argument(help="The GGUF file to write.")],
    tokenizer: Annotated[
        Path, typer.Option(help="A GGUF file with the tokenizer and the chat template.")
    ],
    layout: Annotated[
        Literal["qwen2.5-3b", "qwen3-8b"], typer.Option(help="The model whose sizes it has.")
    ] = "qwen3-8b",
    weights: Annotated[Weights, typer.Option(help="The format of its weights.")] = "Q4_K_M",
) -> None:
    """Write a large model with random weights, in the layout and format of a real one."""
    from gguf import GGUFReader, GGUFWriter
    from rich.progress import track

    sizes = LAYOUTS[layout]
    writer = GGUFWriter(file, sizes.architecture)
    vocabulary = _copy_tokenizer(GGUFReader(tokenizer), writer)
    writer.add_name(f"{layout}, random weights")
    writer.add_context_length(32768)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.ffn)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    generator = np.random.default_rng(0)
    tensors = list(sizes.tensors(vocabulary))
    kinds = [_kind(name, shape, weights, sizes) for name, shape in tensors]
    for (name, shape), kind in zip(tensors, kinds, strict=True):
        stored = (*shape[:-1], _row_bytes(kind, shape[-1]))
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (name, shape), kind in track(
        list(zip(tensors, kinds, strict=True)), description=f"writing {file}"
    ):
        writer.write_tensor_data(_random(generator, name, shape, kind))
    writer.close()


def _copy_tokenizer(reader: Any, writer: Any) -> int:
    """Copy all that the reader's file says of its tokenizer; returns the number of tokens."""
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            kind, *parts = field.types
            writer.add_key_value(name, field.contents(), kind, sub_type=parts[0] if parts else None)
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def _kind(name: str, shape: tuple[int, ...], weights: Weights, sizes: Layout) -> Any:
    """Return the type in which a file of that format has the tensor, as llama.cpp quantises it."""
    from gguf import GGMLQuantizationType as Kind

    if len(shape) == 1:
        return Kind.F32
    if weights != "Q4_K_M":
        return Kind[weights]
    if name in ("output.weight", "token_embd.weight") and (sizes.tied or name[0] == "o"):
        return Kind.Q6_K
    if "attn_v" in name or "ffn_down" in name:
        layer, eighth = int(name.split(".")[1]), sizes.layers // 8
        at_ends = layer < eighth or layer >= 7 * sizes.layers // 8
        if at_ends or (layer - eighth) % 3 == 2:
            return Kind.Q6_K
    return Kind.Q4_K


def _row_bytes(kind: Any, inputs: int) -> int:
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return int(inputs // block * size)


def _random(
    generator: np.random.Generator, name: str, shape: tuple[int, ...], kind: Any
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return a tensor's bytes: norms of ones, no biases, and matrices whose outputs are as large as
    their inputs. All bits of a block but its scales are random, so codes have all values alike."""
    from gguf import GGML_QUANT_SIZES

    if len(shape) == 1:
        return np.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=np.float32)
    rows, inputs = shape
    deviation = inputs**-0.5
    if kind.name == "BF16":
        drawn = generator.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
        return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)
    block, size = GGML_QUANT_SIZES[kind]
    written = np.frombuffer(generator.bytes(rows * inputs // block * size), dtype=np.uint8)
    blocks = written.reshape(-1, size).copy()
    for at, scale in _SCALES[kind.name]:
        value = np.float16(deviation * scale)
        blocks[:, at : at + 2] = np.frombuffer(value.tobytes(), dtype=np.uint8)
    return blocks.reshape(rows, -1)


_SCALES = {
    "Q4_0": [(0, 1 / 4.6)],
    "Q8_0": [(0, 1 / 73.9)],
    # a sub-block's 6 bits of scale, and of its minimum: 31.5 on average, 36 as a root mean square
    "Q4_K": [(0, 1 / 36 / 7.1), (2, 7.5 / 36 / 7.1)],
    "Q6_K": [(208, 1 / 73.9 / 18.5)],
}
"""By type, where in a block its scales in fp16 stand, and by how much the deviation of weights is
multiplied. Codes are alike, of deviation 4.6 (4 bits), 18.5 (6 bits) and 73.9 (8 bits)."""
