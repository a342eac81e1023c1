"""Variants of attention, and attention weights written out for observers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

QUERY_BLOCK = 256
"""The most queries that share one mask."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's variant of attention."""

    scale: float
    """The factor on the products of queries and keys."""

    window: int | None = None
    """A query sees the keys of the last ``window`` positions only, its own included."""

    softcap: float | None = None
    """Scores become softcap · tanh(score / softcap); None for no cap."""

    sinks: Tensor | None = None
    """Extra logits [heads] that take part in the softmax and contribute no value; None for none."""

    @classmethod
    def of_call(cls, query: Tensor, options: Mapping[str, Any]) -> Self:
        """Read the keyword arguments that transformers passes to an attention function, with its
        query [..., head_dim]."""
        scaling = options.get("scaling")
        return cls(
            scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=options.get("sliding_window"),
            softcap=options.get("softcap"),
            sinks=options.get("s_aux"),
        )


def attention_weights(query: Tensor, key: Tensor, options: AttentionOptions) -> Tensor:
    """Compute the attention weights of a ``query`` [heads, queries, dim] over the ``key``
    [kv_heads, length, dim] of all positions up to the last query's: [heads, queries, length],
    fp32; for few queries, at positions next to each other."""
    heads, queries, dim = query.shape
    kv_heads, length, _ = key.shape
    before, window = length - queries, options.window
    first = 0 if window is None else max(before - window + 1, 0)
    folded = query.reshape(kv_heads, heads // kv_heads * queries, dim)
    scores = attention_scores(folded, key[:, first:], None, options).view(heads, queries, -1)
    own = scores[..., before - first :]
    own.masked_fill_(torch.ones_like(own[0], dtype=torch.bool).triu_(1), float("-inf"))
    if window is not None and length > window:
        passed = torch.ones_like(scores[0], dtype=torch.bool).tril_(before - first - window)
        scores.masked_fill_(passed, float("-inf"))
    if options.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        total = torch.logaddexp(torch.logsumexp(scores, dim=-1), options.sinks.float()[:, None])
        weights = torch.exp(scores - total[..., None])
    return F.pad(weights, (first, 0)) if first else weights


def attention_scores(
    query: Tensor, key: Tensor, mask: Tensor | None, options: AttentionOptions
) -> Tensor:
    """Compute the logits of attention before the softmax, fp32; the matrix product has the inputs'
    precision."""
    if query.dtype == torch.float16:  # products before scaling may be more than it can hold
        query, options = query * options.scale, replace(options, scale=1.0)
    scores = scaled_scores(torch.matmul(query, key.transpose(1, 2)).float(), options)
    return scores if mask is None else scores + mask


def scaled_scores(products: Tensor, options: AttentionOptions) -> Tensor:
    """Return the logits of attention whose ``products`` of queries and keys, fp32, these are; they
    are changed."""
    scores = products.mul_(options.scale)
    return (
        scores
        if options.softcap is None
        else options.softcap * torch.tanh(scores / options.softcap)
    )
