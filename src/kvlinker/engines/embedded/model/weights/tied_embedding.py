"""Embeddings that read the head's packed weight: tied ones take no memory of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.grouped_codes import BLOCK
from kvlinker.engines.embedded.model.weights.matrices import Matrix


class TiedEmbedding(nn.Embedding):
    """An embedding that reads the rows of a ``Matrix`` in blocks."""

    def __init__(self, embedding: nn.Embedding, matrix: Matrix) -> None:
        """Do what ``embedding`` does, by ``matrix``, which was made of its weight."""
        nn.Module.__init__(self)
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.matrix = matrix

    @property
    def blocks(self) -> Tensor:
        """The matrix that it reads: [blocks, embedding_dim / 2, BLOCK, 2]."""
        blocks = self.matrix.in_blocks()
        assert blocks is not None, "only weights in blocks are shared"
        return blocks

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """A plain copy of the weight [num_embeddings, embedding_dim], made anew each time, for code
        that saves it."""
        return self.matrix.dense()

    def forward(self, input: Tensor) -> Tensor:
        pairs = self.blocks.view(torch.int32)[..., 0]  # one copy for two numbers
        block = torch.div(input, BLOCK, rounding_mode="floor")
        return pairs[block, :, torch.remainder(input, BLOCK)].view(torch.bfloat16)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write what a plain embedding writes."""
        destination[f"{prefix}weight"] = self.weight


def share_with_embeddings(model: nn.Module, weight: Tensor, matrix: Matrix) -> None:
    """Make the plain embeddings of ``model`` with this ``weight`` read it from ``matrix``, which
    was made of it, if it lies there in blocks."""
    if matrix.in_blocks() is None:
        return
    for owner in list(model.modules()):
        for name, child in list(owner.named_children()):
            if type(child) is not nn.Embedding or child.max_norm is not None:
                continue
            if child.weight is weight:
                setattr(owner, name, TiedEmbedding(child, matrix))
                child._parameters.clear()
