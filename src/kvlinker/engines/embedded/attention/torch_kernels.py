"""Attention over segments by PyTorch's kernels: all devices and dtypes. Calls are merged by their
log-sum-exp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import QUERY_BLOCK, AttentionOptions, attention_scores
from kvlinker.engines.embedded.attention.grouping import AttentionCall, group_queries
from kvlinker.engines.embedded.attention.kernel import AttentionPlan, KeyValue, Segments, View
from kvlinker.engines.embedded.model.rotary import Rotary

Partial = tuple[Tensor, Tensor]
"""Attention over some of the keys: output [heads, queries, value_dim] and log-sum-exp [heads,
queries]."""

FOLDED_LIMIT = 4096
"""The most queries of all heads that share a key head which have rows of a mask each; more of them
share one mask."""

MASK_ALIGNMENT = 8
"""Keys to a multiple of which the rows of a mask lie apart, as CUDA's kernels want it."""


@dataclass(frozen=True)
class TorchPlan(AttentionPlan):
    """Calls that were prepared for the kinds of layers that have been computed."""

    calls: dict[tuple[int | None, bool], PreparedCalls] = field(default_factory=dict)
    """By window, and whether no kernel computes them."""

    angles: dict[Rotary, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Cos and sin of the queries' positions."""


class TorchAttention:
    """Implements ``AttentionKernel`` with PyTorch's kernels."""

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> TorchPlan:
        return TorchPlan.of(views, positions)

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        assert isinstance(plan, TorchPlan), plan
        if rotary is not None:
            if rotary not in plan.angles:
                plan.angles[rotary] = rotary.at(torch.from_numpy(plan.positions).to(key.device))
            rotated = torch.empty_like(key, memory_format=torch.contiguous_format)
            rotary.rotate(key, *plan.angles[rotary], out=rotated)
            key = rotated
        for new, pool in zip((key, value), into, strict=True):
            pool.index_copy_(1, slots, new)

    def attend(
        self,
        plan: AttentionPlan,
        query: Tensor,
        segments: Segments,
        rotary: Rotary | None,
        options: AttentionOptions,
        *,
        output: Tensor,
    ) -> None:
        assert isinstance(plan, TorchPlan), plan
        plain = options.softcap is not None or query.shape[2] != output.shape[2]
        kind = options.window, plain
        if kind not in plan.calls:
            calls = group_queries(plan.views, plan.positions, options.window, long_runs=not plain)
            plan.calls[kind] = PreparedCalls(calls, len(plan.positions), query.device)
        prepared = plan.calls[kind]
        partials = []
        for call in prepared.calls:
            key, value = segments[call.segment]
            mine = call.rotated(query, rotary)
            key, value = key[:, call.first : call.last], value[:, call.first : call.last]
            partials.append(_attend(call, mine, key, value, options, plain=plain))
        if partials:
            output.copy_(merge(partials, prepared.sources, options.sinks).transpose(0, 1))
        else:
            output.zero_()


class PreparedCalls:
    """Calls with everything that they need apart from keys, values and queries, on the device, for
    all layers of a kind."""

    def __init__(self, calls: Sequence[AttentionCall], queries: int, device: torch.device) -> None:
        self.calls = tuple(PreparedCall(call, device) for call in calls)
        sources = _sources(calls, queries)
        self.sources = None if sources is None else torch.from_numpy(sources).to(device)


class PreparedCall:
    """A call's mask, rows and angles as tensors, each made once."""

    def __init__(self, call: AttentionCall, device: torch.device) -> None:
        self.segment = call.segment
        self.first = call.first
        self.last = call.last
        self.causal = call.causal
        rows = call.rows
        neighbours = bool((np.diff(rows) == 1).all())
        self._rows = (
            slice(int(rows[0]), int(rows[-1]) + 1)
            if neighbours
            else torch.from_numpy(rows).to(device)
        )
        self._distances = torch.from_numpy(call.distances).to(device)
        self._hidden = None if call.mask is None else torch.from_numpy(call.mask).to(device)
        self._masks: dict[tuple[int, torch.dtype], Tensor] = {}
        self._angles: dict[Rotary, tuple[Tensor, Tensor]] = {}

    @property
    def masked(self) -> bool:
        """True if the queries see different keys, by a mask."""
        return self._hidden is not None

    def rotated(self, query: Tensor, rotary: Rotary | None) -> Tensor:
        """Return this call's part of the batch's ``query`` [heads, queries, key_dim], rotated and
        contiguous."""
        mine = query[:, self._rows]
        if rotary is None:
            return mine.contiguous()
        if rotary not in self._angles:
            self._angles[rotary] = rotary.at(self._distances)
        rotated = torch.empty_like(mine, memory_format=torch.contiguous_format)
        rotary.rotate(mine, *self._angles[rotary], out=rotated)
        return rotated

    def mask(self, copies: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask [copies · queries, keys], 0 or -inf; None when all see all."""
        if self._hidden is None:
            return None
        if (copies, dtype) not in self._masks:
            queries, keys = self._hidden.shape
            padded = -(-keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
            mask = torch.zeros(copies, queries, padded, dtype=dtype, device=self._hidden.device)
            mask[..., :keys].masked_fill_(self._hidden, float("-inf"))
            self._masks[copies, dtype] = mask.view(copies * queries, padded)[:, :keys]
        return self._masks[copies, dtype]


def merge(partials: Sequence[Partial], sources: Tensor | None, sinks: Tensor | None) -> Tensor:
    """Return attention over all keys [heads, queries, value_dim], zero where a query sees none.

    Query i is in the partials' rows ``sources[i]`` [queries, most], counted through all partials;
    -1 stands for none. Without ``sources``, there is one partial, of all queries. ``sinks`` [heads]
    are more logits in the softmax's denominator.
    """
    if sources is None:
        output, lse = partials[0]
        return (
            output
            if sinks is None
            else output * torch.sigmoid(lse - sinks.float()[:, None])[..., None]
        )
    outputs = torch.cat([output for output, _ in partials], dim=1)
    none = sources < 0
    lse = torch.cat([lse for _, lse in partials], dim=1)[:, sources].masked_fill_(
        none, float("-inf")
    )
    total = torch.logsumexp(lse, dim=-1)  # of [heads, queries, most]
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    weights = torch.exp(lse - total.masked_fill_(total == float("-inf"), 0.0)[..., None])

    def weighted(source: int) -> Tensor:
        found = outputs[:, sources[:, source]] * weights[..., source : source + 1]
        return found.masked_fill_(none[:, source, None], 0.0)  # another query's, which may be NaN

    merged = weighted(0)
    for source in range(1, sources.shape[1]):
        merged += weighted(source)
    return merged


def _sources(calls: Sequence[AttentionCall], queries: int) -> NDArray[np.int64] | None:
    """Return where ``merge`` finds every query; None if one call has them all, in order."""
    rows = np.concatenate([call.rows for call in calls]) if calls else np.zeros(0, np.int64)
    if len(calls) == 1 and np.array_equal(rows, np.arange(queries)):
        return None
    order = np.argsort(rows, kind="stable")
    begins = np.searchsorted(rows[order], np.arange(queries + 1))
    sources = np.full((queries, max(int(np.diff(begins).max()), 1)), -1)
    sources[rows[order], np.arange(len(rows)) - begins[rows[order]]] = order
    return sources


def _attend(
    call: PreparedCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    plain: bool,
) -> Partial:
    """Attention of ``query`` [heads, queries, key_dim] over a call's keys, without sinks."""
    heads, queries, key_dim = query.shape
    copies = heads // len(key)
    if not plain and (call.causal or (call.masked and copies * queries > FOLDED_LIMIT)):
        # Query heads that share a key head are copies in a batch: kernels know which query is
        # which.
        grouped = query.view(len(key), copies, queries, key_dim).transpose(0, 1)
        keys, values = (tensor[None].expand(copies, -1, -1, -1) for tensor in (key, value))
        shared = call.mask(1, query.dtype)
        output, lse = _kernel(grouped, keys, values, options.scale, mask=shared, causal=call.causal)
        return output.transpose(0, 1).reshape(heads, queries, -1), lse.transpose(0, 1).reshape(
            heads, queries
        )
    folded = query.view(len(key), copies * queries, key_dim)
    mask = call.mask(copies, torch.float32 if plain else query.dtype)
    if plain:
        output, lse = _plain(folded, key, value, mask, options)
    else:
        outputs, lses = _kernel(folded[None], key[None], value[None], options.scale, mask=mask)
        output, lse = outputs[0], lses[0]
    return output.reshape(heads, queries, -1), lse.reshape(heads, queries)


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Partial:
    """Attention with its log-sum-exp, over [batch, heads, tokens, head_dim], by PyTorch's kernel
    for the device."""
    if query.device.type == "cpu":
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=causal, attn_mask=mask, scale=scale
        )
        return output, lse
    if mask is not None:
        mask = mask.expand(*query.shape[:2], -1, -1)
    output, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, compute_log_sumexp=True, is_causal=causal, scale=scale
    )
    return output, lse[..., : query.shape[2]]  # it is padded


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Partial:
    """Attention written out, in fp32, for what no kernel offers; in blocks of queries, so that
    scores stay small."""
    outputs, lses = [], []
    for begin in range(0, query.shape[1], QUERY_BLOCK):
        block = slice(begin, begin + QUERY_BLOCK)
        scores = attention_scores(
            query[:, block].float(), key.float(), None if mask is None else mask[block], options
        )
        lse = torch.logsumexp(scores, dim=-1)
        outputs.append(torch.matmul(torch.exp(scores - lse[..., None]), value.float()))
        lses.append(lse)
    return torch.cat(outputs, dim=1), torch.cat(lses, dim=1)
