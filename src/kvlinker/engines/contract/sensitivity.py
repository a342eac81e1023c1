"""Measures how much each token of a chunk depends on the text before the chunk (ours).

A chunk is computed twice: alone, as it is stored, and after an unrelated text. Tokens whose KV
hardly moves mean the same after any text. Tokens whose KV moves most, such as a pronoun and what is
said of it, refer to something before the chunk, and were computed without it. The question's
attention shows which of these tokens matter (``linking.policies.query``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.store.chunk_kv import ChunkKV

UNRELATED_TEXT = "The council met in the old town hall.\n\n"
"""The text before a chunk the second time: short, since a long one moves the KV of all tokens
alike."""


def sensitivity(alone: ChunkKV, behind: ChunkKV) -> NDArray[np.float32]:
    """Compute each token's sensitivity, [tokens]: the distances of its key, without rotary
    embedding, and of its value ``alone`` from those ``behind`` another text, in units of the
    chunk's mean norm, and mean over layers."""
    moved = torch.stack([_moved(*tensors) for tensors in _pairs(alone, behind)])
    found: NDArray[np.float32] = (2 * moved.mean(0)).numpy()
    return found


def with_sensitivity(alone: ChunkKV, behind: ChunkKV) -> ChunkKV:
    """Add the tokens' sensitivity to the scores of ``alone``, if it has any."""
    if alone.scores is None:
        return alone
    return replace(alone, scores=replace(alone.scores, sensitivity=sensitivity(alone, behind)))


def _pairs(alone: ChunkKV, behind: ChunkKV) -> Iterator[tuple[Tensor, Tensor]]:
    for one, other in zip(alone.layers, behind.layers, strict=True):
        yield one.key, other.key
        yield one.value, other.value


def _moved(one: Tensor, other: Tensor) -> Tensor:
    """Return the tokens' distances in two tensors [heads, tokens, dim], over their mean norm in the
    first: [tokens]."""
    norm = partial(torch.linalg.vector_norm, dim=(0, 2), dtype=torch.float32)
    moved: Tensor = norm(one.float() - other.float()) / norm(one).mean().clamp_min(
        torch.finfo(torch.float32).tiny
    )
    return moved
