"""How far a linked prompt is from a full prefill inside the model (CacheBlend section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.evaluation.inspection import LayerView


@dataclass(frozen=True, slots=True)
class Deviation:
    """By layer. ``kv``: ‖KV − KV_full‖ / ‖KV_full‖ of a token that a chunk cache holds, on average over them; keys and
    values, all heads. ``attention``: ‖A − A_full‖ of a query's attention on all tokens, on average over heads and the
    prompt's last tokens. All norms are L2. The paper divides by nothing; here layers and models can be compared.
    """

    kv: tuple[float, ...]
    attention: tuple[float, ...]


def deviation(full: Sequence[LayerView], other: Sequence[LayerView], cached: NDArray[np.bool_]) -> Deviation:
    """Of a prompt under a policy, from the same under ``full``. ``cached`` [tokens]: those that a chunk cache holds."""
    pairs = list(zip(full, other, strict=True))
    return Deviation(
        kv=tuple(_kv_deviation(reference, view, cached) for reference, view in pairs),
        attention=tuple(_attention_deviation(reference.attention, view.attention) for reference, view in pairs),
    )


def _kv_deviation(reference: LayerView, view: LayerView, cached: NDArray[np.bool_]) -> float:
    held = np.flatnonzero(cached)
    changed = _squares(view.key.float() - reference.key) + _squares(view.value.float() - reference.value)  # [tokens]
    size = _squares(reference.key) + _squares(reference.value)
    return float((changed[held] / size[held]).sqrt().mean())


def _squares(heads: Tensor) -> Tensor:
    """[kv_heads, tokens, head_dim] to the sum of squares by token."""
    return heads.float().square().sum(dim=(0, 2)).cpu()


def _attention_deviation(reference: Tensor, attention: Tensor) -> float:
    """Steps may end with fewer tokens than are kept; then only those are compared."""
    queries = min(reference.shape[1], attention.shape[1])
    return float((attention[:, -queries:] - reference[:, -queries:]).norm(dim=-1).mean())
