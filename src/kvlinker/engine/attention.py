"""Attention by position: queries of one request over its keys up to each query's own position."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

QUERY_BLOCK = 256
"""Queries that share one mask at most."""


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


@dataclass(frozen=True)
class Queries:
    """Positions of one request's queries that are computed together, ascending: [queries]."""

    positions: Tensor

    def __len__(self) -> int:
        return len(self.positions)

    @cached_property
    def first(self) -> int:
        return int(self.positions[0])

    @cached_property
    def last(self) -> int:
        return int(self.positions[-1])

    @cached_property
    def contiguous(self) -> bool:
        return self.last - self.first + 1 == len(self)

    @cached_property
    def blocks(self) -> tuple[tuple[slice, Queries], ...]:
        """Parts of at most QUERY_BLOCK queries, with the rows that they take."""
        rows = [slice(begin, begin + QUERY_BLOCK) for begin in range(0, len(self), QUERY_BLOCK)]
        return tuple((part, Queries(self.positions[part])) for part in rows)

    @cached_property
    def _masks(self) -> dict[tuple[int | None, int, torch.dtype], Tensor | None]:
        return {}

    def first_seen(self, window: int | None) -> int:
        """The first position that any of the queries sees."""
        return 0 if window is None else max(self.first - window + 1, 0)

    def mask(self, window: int | None, copies: int, dtype: torch.dtype) -> Tensor | None:
        """What each of ``copies`` copies of the queries sees of positions [first_seen, last]: 0 or -inf,
        [copies · queries, keys]; None when all see all. Computed once for all layers of a kind."""
        if window is not None and self.last < window:
            window = None
        if len(self) == 1:
            return None
        variant = (window, copies, dtype)
        if variant not in self._masks:
            positions = self.positions[:, None]
            keys = torch.arange(self.first_seen(window), self.last + 1, device=positions.device)[None]
            hidden = keys > positions
            if window is not None:
                hidden |= keys <= positions - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, float("-inf"))
            self._masks[variant] = mask.repeat(copies, 1)
        return self._masks[variant]


def attend(queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """Causal attention.

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


def attention_weights(queries: Queries, query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """The weights that ``attend`` would use, written out: [heads, queries, last + 1], fp32. Meant for few queries."""
    first = queries.first_seen(options.window)
    groups = query.shape[0] // key.shape[0]
    folded = query.reshape(key.shape[0], groups * len(queries), query.shape[2])
    windowed = options.window is not None and queries.last >= options.window
    mask = None if queries.contiguous and not windowed else queries.mask(options.window, groups, torch.float32)
    scores = _scores(folded, key[:, first:], mask, options).view(query.shape[0], len(queries), -1)
    if mask is None:  # only the queries' own positions hide anything
        own = scores[..., -len(queries) :]
        own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), float("-inf"))
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
        weights = torch.exp(scores - total[..., None])
    return F.pad(weights, (first, 0)) if first else weights


def _masked(queries: Queries, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """One kernel call under an explicit mask, over the keys that any of the queries sees."""
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
    """Attention and log-sum-exp of contiguous queries: earlier keys without a mask, own keys causally, then merged."""
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
    scores = _scores(query.float(), key.float(), mask, options)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - lse[..., None])
    return torch.matmul(weights, value.float()).to(query.dtype), lse


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions) -> Tensor:
    """What the softmax is taken of, fp32; the matrix product has the inputs' precision."""
    scores = torch.matmul(query, key.transpose(1, 2)).float().mul_(options.scale)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    return scores if mask is None else scores + mask
