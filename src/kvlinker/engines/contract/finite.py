"""Refuses to keep KV in which numbers overflowed."""

from __future__ import annotations

import torch

from kvlinker.base.errors import KVLinkerError
from kvlinker.store.chunk_kv import ChunkKV


def require_finite(kv: ChunkKV) -> None:
    """Raise KVLinkerError if numbers of the KV overflowed: requests that link it would fail."""
    kept = [(f"layer {index}", layer.parts) for index, layer in enumerate(kv.layers)]
    kept += [(f"state {index}", state.tensors) for index, state in enumerate(kv.states)]
    for name, parts in kept:
        for part in parts:
            if part.numel() and not torch.stack(torch.aminmax(part)).isfinite().all():
                raise KVLinkerError(
                    f"The chunk's KV is not all finite: {name} holds NaN or infinity. Compare the"
                    " model with its own forward pass by `kvlinker check`, or serve it with dtype"
                    " 'float32'."
                )
