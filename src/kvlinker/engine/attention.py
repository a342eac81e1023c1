"""Attention of one run: its queries over its request's keys up to each query's own position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

LONG_RUN = 256
"""Runs of more queries are split into the keys before them, which need no mask, and their own, which are causal."""

QUERY_BLOCK = 256
"""Queries that are masked together where a window or a soft cap rules out the split."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's variant of attention.

    ``window``: a query sees the keys of the last ``window`` positions, its own included. ``softcap``: scores
    become softcap·tanh(score / softcap). ``sinks`` [heads]: extra logits that take attention and give nothing.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention of the last positions.

    ``query`` [heads, run, key_dim] stands at the last positions of ``key`` [kv_heads, length, key_dim] and ``value``
    [kv_heads, length, value_dim]. Query heads share key heads in equal groups, neighbours first. Returns
    [heads, run, value_dim].
    """
    run, length = query.shape[1], key.shape[1]
    windowed = options.window is not None and length > options.window
    if options.softcap is None and not windowed and run > LONG_RUN and query.device.type == "cpu":
        output, lse = _long_run(query, key, value, options.scale)
        return _with_sinks(output, lse, options)
    if run > QUERY_BLOCK and (windowed or options.softcap is not None):
        blocks = []
        for begin in range(0, run, QUERY_BLOCK):
            end = length - run + min(begin + QUERY_BLOCK, run)
            blocks.append(_masked(query[:, begin : begin + QUERY_BLOCK], key[:, :end], value[:, :end], options))
        return torch.cat(blocks, dim=1)
    return _masked(query, key, value, options)


def _masked(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """One kernel call under an explicit mask, over the keys that any of the queries sees."""
    run = query.shape[1]
    if options.window is not None:
        visible = options.window + run - 1
        key, value = key[:, -visible:], value[:, -visible:]
    groups = query.shape[0] // key.shape[0]
    mask = _mask(run, key.shape[1], options.window, groups, query.dtype, query.device)
    folded = query.reshape(key.shape[0], groups * run, query.shape[2])
    if options.softcap is not None or (options.sinks is not None and query.device.type != "cpu"):
        output, lse = _plain(folded, key, value, mask, options)
    elif query.device.type == "cpu":
        output, lse = _flash(folded[None], key[None], value[None], options.scale, mask=mask)
    else:
        output = F.scaled_dot_product_attention(
            folded[None], key[None], value[None], attn_mask=mask, scale=options.scale
        )[0]
        return output.reshape(query.shape[0], run, value.shape[2])
    output = output.reshape(query.shape[0], run, value.shape[2])
    return _with_sinks(output, lse.reshape(query.shape[0], run), options)


def _long_run(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp of a long run: earlier keys without a mask, own keys causally, then merged."""
    heads, run, _ = query.shape
    kv_heads, length, _ = key.shape
    before = length - run
    grouped = query.view(kv_heads, heads // kv_heads, run, -1).transpose(0, 1)  # [groups, kv_heads, run, key_dim]

    def shared(tensor: Tensor) -> Tensor:
        return tensor[None].expand(len(grouped), -1, -1, -1)

    def ungrouped(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        return output.transpose(0, 1).reshape(heads, run, -1), lse.transpose(0, 1).reshape(heads, run)

    own = ungrouped(*_flash_call(grouped, shared(key[:, before:]), shared(value[:, before:]), scale, causal=True))
    if not before:
        return own
    earlier = _flash(
        query.reshape(kv_heads, -1, query.shape[2])[None], key[None, :, :before], value[None, :, :before], scale
    )
    return merge(own, (earlier[0].reshape(heads, run, -1), earlier[1].reshape(heads, run)))


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from (output [heads, run, dim], lse [heads, run]) over each."""
    lse = torch.logaddexp(first[1], second[1])
    weight_first = torch.exp(first[1] - lse).to(first[0].dtype)[..., None]
    weight_second = torch.exp(second[1] - lse).to(first[0].dtype)[..., None]
    return first[0] * weight_first + second[0] * weight_second, lse


def _with_sinks(output: Tensor, lse: Tensor, options: AttentionOptions) -> Tensor:
    """exp(sink) joins the softmax's denominator: the output shrinks by exp(lse) / (exp(lse) + exp(sink))."""
    if options.sinks is None:
        return output
    kept = torch.sigmoid(lse - options.sinks.float()[:, None])
    return output * kept[..., None].to(output.dtype)


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    output, lse = _flash_call(query, key, value, scale, mask=mask)
    return output[0], lse[0]


def _flash_call(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """PyTorch's flash attention for CPUs, which alone of its kernels there also returns the log-sum-exp."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )
    return output, lse


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Attention written out, in fp32, for what no kernel offers."""
    scores = torch.matmul(query.float(), key.float().transpose(1, 2)) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.matmul(weights, value.float()).to(query.dtype), lse


@lru_cache(maxsize=64)
def _mask(
    run: int, length: int, window: int | None, groups: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """What each of ``groups`` copies of ``run`` queries at the last of ``length`` positions sees: 0 or -inf,
    [groups · run, length]; None when all see all."""
    if run == 1 and (window is None or length <= window):
        return None
    positions = torch.arange(length - run, length, device=device)[:, None]
    keys = torch.arange(length, device=device)[None]
    hidden = keys > positions
    if window is not None:
        hidden |= keys <= positions - window
    mask = torch.zeros(run, length, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    return mask.repeat(groups, 1)
