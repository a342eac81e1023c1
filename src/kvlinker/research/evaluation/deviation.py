"""How far a linked prompt is from a full prefill inside the model (CacheBlend section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.research.evaluation.inspection import LayerView


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
    held = np.flatnonzero(cached)
    relative = relative_kv_distance(full, other)[:, held]
    return Deviation(kv=tuple(relative.mean(axis=1).tolist()), attention=attention_deviation(full, other))


def relative_kv_distance(full: Sequence[LayerView], other: Sequence[LayerView]) -> NDArray[np.float32]:
    """‖KV − KV_full‖ / ‖KV_full‖ of every token in every layer, [layers, tokens]."""
    return kv_distance(full, other) / _kv_norm(full)


def kv_distance(full: Sequence[LayerView], other: Sequence[LayerView]) -> NDArray[np.float32]:
    """‖KV − KV_full‖ of every token in every layer, [layers, tokens]: L2 over keys and values of all heads.

    It is the paper's KV deviation (table 1), which it calls an absolute difference.
    """
    return np.stack(
        [
            _norms(view.key.float() - reference.key, view.value.float() - reference.value)
            for reference, view in zip(full, other, strict=True)
        ]
    )


def attention_deviation(full: Sequence[LayerView], other: Sequence[LayerView]) -> tuple[float, ...]:
    """By layer, ‖A − A_full‖ as in ``Deviation``."""
    pairs = zip(full, other, strict=True)
    return tuple(_attention_distance(reference.attention, view.attention) for reference, view in pairs)


def _kv_norm(views: Sequence[LayerView]) -> NDArray[np.float32]:
    """‖KV‖, [layers, tokens]."""
    return np.stack([_norms(view.key.float(), view.value.float()) for view in views])


def _norms(key: Tensor, value: Tensor) -> NDArray[np.float32]:
    """L2 norm of every token over key and value, both [kv_heads, tokens, head_dim]: [tokens]."""
    norms: NDArray[np.float32] = (_squares(key) + _squares(value)).sqrt().cpu().numpy()
    return norms


def _squares(heads: Tensor) -> Tensor:
    return heads.square().sum(dim=(0, 2))


def _attention_distance(reference: Tensor, attention: Tensor) -> float:
    """Steps may end with fewer tokens than are kept; then only those are compared."""
    queries = min(reference.shape[1], attention.shape[1])
    return float((attention[:, -queries:] - reference[:, -queries:]).norm(dim=-1).mean())
