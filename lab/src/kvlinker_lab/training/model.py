"""Defines a Llama for training on a CPU, with the parameters of `LlamaForCausalLM` but fewer
operations.

Parameter names equal those of Hugging Face, so a state dictionary moves over unchanged. Called by
`train`, which exports it; everything else uses the exported model.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvlinker_lab.training.tokenizer import BOS, END, PAD, VOCABULARY_SIZE

_QUERY_BLOCK = 64
"""The queries whose attention is computed at once, which bounds the memory."""

_SINK_SLACK = 0.7  # attention on the first token above exp(-0.7) = 0.5 costs nothing
"""The negative logarithm of the attention on token 0 up to which a head has no loss: half of its
attention."""

_SINK_ENOUGH = 0.6  # nor does anything in a layer whose mean attention on it is higher
"""The mean attention on token 0 from which a layer has no loss."""


@dataclass(frozen=True)
class ModelSettings:
    """Describes the reader's shape."""

    vocab_size: int = VOCABULARY_SIZE
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 6
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    rope_theta: float = 500_000.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 4096

    def hugging_face(self) -> dict[str, Any]:
        """Return the keyword arguments of `transformers.LlamaConfig`."""
        arguments = asdict(self)
        theta = arguments.pop("rope_theta")
        return arguments | {
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": False,
            "bos_token_id": BOS,
            "eos_token_id": END,
            "pad_token_id": PAD,
        }


class Linear(nn.Linear):
    """Applies a linear map without bias, in its input's precision."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """Normalises by the root mean square, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, tokens, dim] by tables [tokens, dim] or [batch, 1, tokens, dim]."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend over [batch, heads, tokens, dim], in blocks of queries that fit into the cache.

    Under `torch.compile` on one core this is up to twice as fast as the flash kernel.
    """
    tokens = q.shape[2]
    outputs: list[Tensor] = []
    for start in range(0, tokens, _QUERY_BLOCK):
        end = min(tokens, start + _QUERY_BLOCK)
        later = torch.arange(end) > torch.arange(start, end)[:, None]
        outputs.append(_block_attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], later))
    return torch.cat(outputs, dim=2)


def attention_at(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
    """Attend with queries [batch, heads, n, dim] at positions [batch, n] to all tokens up to
    them."""
    tokens = torch.arange(k.shape[2])
    outputs: list[Tensor] = []
    for start in range(0, q.shape[2], _QUERY_BLOCK):
        end = min(q.shape[2], start + _QUERY_BLOCK)
        later = tokens > positions[:, None, start:end, None]
        outputs.append(_block_attention(q[:, :, start:end], k, v, later))
    return torch.cat(outputs, dim=2)


def _block_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.transpose(2, 3)).float() * q.shape[3] ** -0.5
    return torch.softmax(scores.masked_fill(hidden, -1e9), dim=-1).to(v.dtype) @ v


class Attention(nn.Module):
    """Computes causal grouped-query attention, with the attention that sampled queries pay to token
    0."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        s = self.settings = settings
        self.q_proj = Linear(s.hidden_size, s.num_attention_heads * s.head_dim)
        self.k_proj = Linear(s.hidden_size, s.num_key_value_heads * s.head_dim)
        self.v_proj = Linear(s.hidden_size, s.num_key_value_heads * s.head_dim)
        self.o_proj = Linear(s.num_attention_heads * s.head_dim, s.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, probes: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the output [batch, n, size] and -log(attention on token 0) [batch, heads, probes].

        Queries are all n = tokens of x [batch, tokens, size], or those at `positions` [batch, n]
        only. `probes` are indices of queries.
        """
        s = self.settings
        batch, tokens, _ = x.shape
        groups = s.num_attention_heads // s.num_key_value_heads
        k = self.k_proj(x).view(batch, tokens, -1, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, -1, s.head_dim).transpose(1, 2)
        k = rotate(k, cos, sin).repeat_interleave(groups, dim=1)
        v = v.repeat_interleave(groups, dim=1)
        if positions is None:
            q = self.q_proj(x).view(batch, tokens, -1, s.head_dim).transpose(1, 2)
            q = rotate(q, cos, sin)
            out = causal_attention(q, k, v)
            probed = probes[None]
        else:
            x = take(x, positions)
            q = self.q_proj(x).view(batch, positions.shape[1], -1, s.head_dim).transpose(1, 2)
            q = rotate(q, cos[positions][:, None], sin[positions][:, None])
            out = attention_at(q, k, v, positions)
            probed = positions[:, probes]
        out = out.transpose(1, 2).reshape(batch, q.shape[2], -1)

        scores = q[:, :, probes] @ k.transpose(2, 3)  # [batch, heads, probes, tokens]
        later = torch.arange(tokens) > probed[:, None, :, None]
        scores = (scores.float() * s.head_dim**-0.5).masked_fill(later, -1e9)
        missed = torch.logsumexp(scores, dim=-1) - scores[..., 0]
        return self.o_proj(out), missed


def take(x: Tensor, positions: Tensor) -> Tensor:
    """Return the rows [batch, n, size] of x [batch, tokens, size] at positions [batch, n]."""
    return x.gather(1, positions[:, :, None].expand(-1, -1, x.shape[2]))


class MLP(nn.Module):
    """Computes the gated feed-forward network."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.gate_proj = Linear(settings.hidden_size, settings.intermediate_size)
        self.up_proj = Linear(settings.hidden_size, settings.intermediate_size)
        self.down_proj = Linear(settings.intermediate_size, settings.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """Computes one decoder layer."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.self_attn = Attention(settings)
        self.mlp = MLP(settings)
        self.input_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, probes: Tensor, positions: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output at all positions or at some, and what `Attention` says of token
        0."""
        attended, missed = self.self_attn(self.input_layernorm(x), cos, sin, probes, positions)
        x = attended + (x if positions is None else take(x, positions))
        return x + self.mlp(self.post_attention_layernorm(x)), missed


class Decoder(nn.Module):
    """Holds embeddings, layers and the last norm."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(Block(settings) for _ in range(settings.num_hidden_layers))
        self.norm = RMSNorm(settings.hidden_size, settings.rms_norm_eps)

    def attention(self, layer: int) -> Attention:
        """Return the attention of a layer."""
        block = self.layers[layer]
        assert isinstance(block, Block)
        return block.self_attn


class Reader(nn.Module):
    """Holds the trainable model; `hidden` and `logits` are separate so that few logits are
    computed."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        self.settings = settings
        self.model = Decoder(settings)
        self.lm_head = Linear(settings.hidden_size, settings.vocab_size)
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "head" in name else 0.06)

    def hidden(self, ids: Tensor, probes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden states [batch, n, size] of ids [batch, tokens] at positions
        [batch, n].

        Also, for layers >= 1, -log(attention on token 0) [layers - 1, batch, heads, probes] at the
        probed tokens (in the last layer, which computes only `positions`, at some of those).
        """
        s = self.settings
        tokens, last = ids.shape[1], s.num_hidden_layers - 1
        dims = torch.arange(0, s.head_dim, 2, dtype=torch.float32) / s.head_dim
        angles = torch.arange(tokens)[:, None] * s.rope_theta**-dims
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        x = self.model.embed_tokens(ids).bfloat16()
        sinks: list[Tensor] = []
        for i, layer in enumerate(self.model.layers):
            if i == last:
                x, missed = layer(x, cos, sin, probes * positions.shape[1] // tokens, positions)
            else:
                x, missed = layer(x, cos, sin, probes, None)
            sinks.append(missed)
        return self.model.norm(x), torch.stack(sinks[1:])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits of hidden states, in float32."""
        out: Tensor = self.lm_head(hidden).float()
        return out

    def export(self, tokenizer: Path, target: Path) -> None:
        """Put model, configuration and tokenizer files into `target` in the Hugging Face format."""
        model = LlamaForCausalLM(LlamaConfig(**self.settings.hugging_face())).to(torch.bfloat16)
        model.load_state_dict(self.state_dict())
        export_model(model, tokenizer, target)

    def sink_loss(self, missed: Tensor, sink_weight: float) -> tuple[Tensor, float]:
        """Return the loss of what `hidden` says of token 0, so much of it as is wanted, and the
        mean attention on token 0 in layers >= 1."""
        attention = torch.exp(-missed).mean((1, 2, 3))  # [layers - 1]
        lacking = (attention < _SINK_ENOUGH).float()
        sink = (functional.relu(missed - _SINK_SLACK).mean((1, 2, 3)) * lacking).mean()
        return sink_weight * sink, attention.mean().item()


def export_model(model: PreTrainedModel, tokenizer: Path, target: Path) -> None:
    """Put the files of a model, and those of its tokenizer, into `target`, each in one move."""
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=END, pad_token_id=PAD, do_sample=False
    )
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".reader-") as folder:
        model.save_pretrained(folder)
        for path in sorted(tokenizer.iterdir()):
            (Path(folder) / path.name).write_bytes(path.read_bytes())
        for path in sorted(Path(folder).iterdir()):
            path.chmod(0o644)
            path.replace(target / path.name)
