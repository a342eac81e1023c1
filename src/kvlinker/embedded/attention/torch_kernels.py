"""Attention by position: queries of one request over its keys up to each query's own position."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from kvlinker.engine.attention import QUERY_BLOCK, AttentionOptions, Queries, attention_scores


def attend(queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Compute causal attention.

    ``query`` [heads, queries, key_dim]; ``key`` [kv_heads, last + 1, key_dim] and ``value`` [kv_heads, last + 1,
    value_dim] stand at positions from 0 on. Query heads share key heads in equal groups, neighbours first. Returns
    [heads, queries, value_dim].
    """
    if len(queries) <= QUERY_BLOCK:
        return _masked(queries, query, key, value, options)
    windowed = options.window is not None and queries.last >= options.window
    if queries.contiguous and not windowed and options.softcap is None and query.device.type == "cpu":
        return _with_sinks(*_long_run(query, key, value, options.scale), options)
    blocks = [
        _masked(part, query[:, rows], key[:, : part.last + 1], value[:, : part.last + 1], options)
        for rows, part in queries.blocks
    ]
    return torch.cat(blocks, dim=1)


def _masked(queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Attend in one kernel call under an explicit mask, over the keys that any of the queries sees."""
    first = queries.first_seen(options.window)
    key, value = key[:, first:], value[:, first:]
    groups = query.shape[0] // key.shape[0]
    mask = queries.mask(options.window, groups, query.dtype)
    folded = query.reshape(key.shape[0], groups * len(queries), query.shape[2])
    shape = (query.shape[0], len(queries), value.shape[2])
    if options.softcap is not None or (options.sinks is not None and query.device.type != "cpu"):
        output, lse = _plain(folded, key, value, mask, options)
    elif query.device.type == "cpu":
        output, lse = _flash(folded[None], key[None], value[None], options.scale, mask=mask)
    else:
        attended = F.scaled_dot_product_attention(
            folded[None], key[None], value[None], attn_mask=mask, scale=options.scale
        )
        return attended.reshape(shape)
    return _with_sinks(output.reshape(shape), lse.reshape(shape[:2]), options)


def _long_run(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return attention and log-sum-exp of contiguous queries: over earlier keys without a mask and over their own
    causally, then merged."""
    heads, run, _ = query.shape
    kv_heads, length, _ = key.shape
    before = length - run
    grouped = query.reshape(kv_heads, heads // kv_heads, run, -1).transpose(0, 1)  # [groups, kv_heads, run, key_dim]

    def shared(tensor: Tensor) -> Tensor:
        return tensor[None].expand(len(grouped), -1, -1, -1)

    output, lse = _flash_call(grouped, shared(key[:, before:]), shared(value[:, before:]), scale, causal=True)
    own = output.transpose(0, 1).reshape(heads, run, -1), lse.transpose(0, 1).reshape(heads, run)
    if not before:
        return own
    folded = query.reshape(kv_heads, -1, query.shape[2])
    output, lse = _flash(folded[None], key[None, :, :before], value[None, :, :before], scale)
    return merge(own, (output.reshape(heads, run, -1), lse.reshape(heads, run)))


def merge(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint sets of keys, given (output [heads, run, dim], lse [heads, run]) over each."""
    lse = torch.logaddexp(first[1], second[1])
    weight_first = torch.exp(first[1] - lse).to(first[0].dtype)[..., None]
    weight_second = torch.exp(second[1] - lse).to(first[0].dtype)[..., None]
    return first[0] * weight_first + second[0] * weight_second, lse


def _with_sinks(output: Tensor, lse: Tensor, options: AttentionOptions) -> Tensor:
    """Add exp(sink) to the softmax's denominator: the output shrinks by exp(lse) / (exp(lse) + exp(sink))."""
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
    """Call PyTorch's flash attention for CPUs, the only one of its kernels there that also returns the log-sum-exp."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, is_causal=causal, attn_mask=mask, scale=scale
    )
    return output, lse


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Compute attention step by step in fp32, for options that no kernel offers."""
    scores = attention_scores(query.float(), key.float(), mask, options)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.matmul(weights, value.float()).to(query.dtype), lse
