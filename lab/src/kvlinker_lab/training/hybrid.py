"""Makes a hybrid of the trained reader: a Qwen3.5 of its width in which one layer attends, and all
others keep a state by a gated delta rule. Its training goes on from the reader's weights, and
learns what the reader's layers give beside its answers.

A layer that keeps a state begins with the projections of the attention in whose place it stands.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from kvlinker_lab.training.model import ModelSettings, export_model, take
from kvlinker_lab.training.tokenizer import BOS, END, PAD

_TEACHERS = (0, 1, None, 2, 3, 5)
"""For each layer, the reader's layer that it begins as: layer 2 of the reader finds the facts that
are asked for, layer 4 can be left out, and the new layer adds nothing at first."""

_KEY_HEADS, _VALUE_HEADS, _DIM = 4, 8, 32
_SPREAD = 1.5
"""Root mean square of the reader's queries and keys where it looks facts up, about."""


class HybridReader(nn.Module):
    """Holds the trainable model, and the reader that it learns from."""

    def __init__(self, teacher: Path, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.whole = Qwen3_5ForCausalLM(_configuration())
        reader = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
        with torch.no_grad():
            _convert(reader.float(), self.whole)
        self._teacher = [reader.bfloat16().eval()]  # in a list: it is not trained, nor saved
        self.model = self.whole.model

    def hidden(self, ids: Tensor, probes: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden states [batch, n, size] of ids [batch, tokens] at positions
        [batch, n].

        Also how far all layers are from the reader's: [layers], in units of these.
        """
        with torch.autocast("cpu", torch.bfloat16):
            found = self.model(ids, use_cache=False, output_hidden_states=True)
        with torch.no_grad():
            taught = self._teacher[0].model(ids, use_cache=False, output_hidden_states=True)
        distances = [
            (mine - wanted).float().pow(2).mean() / wanted.float().pow(2).mean()
            for teacher, mine in zip(_TEACHERS, found.hidden_states[1:], strict=True)
            if teacher is not None
            for wanted in (taught.hidden_states[teacher + 1],)
        ]
        return take(found.last_hidden_state, positions), torch.stack(distances)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the next-token logits of hidden states, in float32."""
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = self.whole.lm_head(hidden).float()
        return out

    def sink_loss(self, distances: Tensor, sink_weight: float) -> tuple[Tensor, float]:
        """Return the loss of the distances from the reader's layers, and their mean."""
        mean = distances.mean()
        return mean, mean.item()

    def export(self, tokenizer: Path, target: Path) -> None:
        """Put the model's files, and those of the tokenizer, into ``target``."""
        model = Qwen3_5ForCausalLM(self.whole.config)
        model.load_state_dict(self.whole.state_dict())
        export_model(model.bfloat16(), tokenizer, target)


def _configuration() -> Qwen3_5TextConfig:
    shape = ModelSettings()
    return Qwen3_5TextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=len(_TEACHERS),
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        linear_num_key_heads=_KEY_HEADS,
        linear_num_value_heads=_VALUE_HEADS,
        linear_key_head_dim=_DIM,
        linear_value_head_dim=_DIM,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": 1.0,
            "mrope_section": [6, 5, 5],
        },
        rms_norm_eps=shape.rms_norm_eps,
        max_position_embeddings=shape.max_position_embeddings,
        bos_token_id=BOS,
        eos_token_id=END,
        pad_token_id=PAD,
    )


def _convert(reader: LlamaForCausalLM, hybrid: Qwen3_5ForCausalLM) -> None:
    """Set the hybrid's weights to the reader's where they fit."""
    hybrid.lm_head.weight.copy_(reader.lm_head.weight)
    hybrid.model.embed_tokens.weight.copy_(reader.model.embed_tokens.weight)
    hybrid.model.norm.weight.copy_(reader.model.norm.weight - 1)
    for number, layer in zip(_TEACHERS, hybrid.model.layers, strict=True):
        teacher = reader.model.layers[0 if number is None else number]
        layer.mlp.load_state_dict(teacher.mlp.state_dict())
        for norm in ("input_layernorm", "post_attention_layernorm"):
            getattr(layer, norm).weight.copy_(getattr(teacher, norm).weight - 1)
        if hasattr(layer, "self_attn"):
            _convert_attention(teacher.self_attn, layer.self_attn)
        else:
            _convert_state(teacher.self_attn, layer.linear_attn)
        if number is None:
            layer.linear_attn.out_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()


def _convert_attention(teacher: Any, attention: Any) -> None:
    """Begin as the reader's attention, with queries and keys of one length, and open gates."""
    asked = teacher.q_proj.weight.unflatten(0, (-1, _DIM))
    gates = torch.zeros_like(asked)
    attention.q_proj.weight.copy_(torch.cat([asked, gates], 1).flatten(0, 1))
    attention.k_proj.weight.copy_(teacher.k_proj.weight)
    attention.v_proj.weight.copy_(teacher.v_proj.weight)
    attention.o_proj.weight.copy_(2 * teacher.o_proj.weight)
    attention.q_norm.weight.fill_(_SPREAD - 1)
    attention.k_norm.weight.fill_(_SPREAD - 1)


def _convert_state(teacher: Any, state: Any) -> None:
    """Begin with the attention's projections, and states that remember from two tokens to some
    thousand."""
    keys = teacher.k_proj.weight
    asked = teacher.q_proj.weight.unflatten(0, (_KEY_HEADS, 2, _DIM)).mean(1).flatten(0, 1)
    values = teacher.v_proj.weight.unflatten(0, (_KEY_HEADS, _DIM)).repeat_interleave(2, 0)
    state.in_proj_qkv.weight.copy_(torch.cat([asked, keys, values.flatten(0, 1)]))
    state.out_proj.weight.copy_(teacher.o_proj.weight)
    nn.init.normal_(state.in_proj_z.weight, std=0.06)
    nn.init.normal_(state.conv1d.weight, std=0.05)
    state.conv1d.weight[..., -1] += 1
    state.A_log.zero_()
    forgotten = torch.logspace(-3, -0.5, _VALUE_HEADS)
    state.dt_bias.copy_(torch.log(torch.expm1(forgotten)))
