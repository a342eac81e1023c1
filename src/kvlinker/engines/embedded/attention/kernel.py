"""The interface of attention kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.views import AttentionPlan, KeyValue, Segments, View
from kvlinker.engines.embedded.model.rotary import Rotary


class AttentionKernel(Protocol):
    """Computes the attention of a step's queries over the segments that they see."""

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> AttentionPlan:
        """Prepare what is the same in all layers; ``positions`` [queries] are those of all queries
        of the step."""
        ...

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        """Write the step's new keys, which are rotated on the way, and values to ``slots``
        [queries] of a pool.

        ``key`` and ``value`` are [kv_heads, queries, dim], those of the pool, ``into``, [kv_heads,
        slots, dim].
        """
        ...

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
        """Compute one layer into ``output`` [queries, heads, value_dim], zero where a query sees
        nothing.

        ``query`` [heads, queries, key_dim] has no rotary embedding; query heads share key heads in
        equal groups, neighbours first. Without ``rotary``, the segments' keys have none either. The
        plan is one of this kernel.
        """
        ...
