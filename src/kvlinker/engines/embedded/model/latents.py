"""Attention over latents in place, without expanding them to the keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """One layer of attention that keeps, for each token, a latent and a key that all heads share.

    A head's key is a projection of the latent, and after it the shared key; its value is another
    projection. A product with a projected latent is that of the query, projected back, with the
    latent itself, and a sum of projected latents is the projection of their sum. So all heads
    attend to one key, [shared | latent], and to one value, the latent.
    """

    projection: nn.Linear
    """Makes all heads' keys and values of a latent: its weight is [heads · (key + value),
    latent]."""

    heads: int
    key_dim: int
    """The dimensions of a head's key that are a projection of the latent."""

    shared_dim: int
    """The dimensions of the key that all heads share."""

    @classmethod
    def of(cls, module: nn.Module, query: Tensor, shared: Tensor) -> Latents:
        """Read the layer from its attention ``module``, called with ``query`` [1, heads, tokens,
        dim] and the ``shared`` key [1, 1, tokens, shared_dim].

        Raises LookupError if its projection is not found.
        """
        projection = getattr(module, "kv_b_proj", None)
        if not isinstance(projection, nn.Linear) or projection.bias is not None:
            raise LookupError(
                f"{type(module).__name__} does not project latents by kv_b_proj alone"
            )
        shared_dim = shared.shape[-1]
        return cls(projection, query.shape[1], query.shape[-1] - shared_dim, shared_dim)

    def kept(self, shared: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is kept as a token's key and value, of the ``shared`` key and the ``latent``
        [..., dim]: these. Without any shared key, they are the two halves of the latent."""
        if self.shared_dim:
            return shared, latent
        first, second = latent.tensor_split(2, dim=-1)
        return first, second

    @property
    def value_dim(self) -> int:
        """The dimensions of a head's value."""
        return self.projection.out_features // self.heads - self.key_dim

    @property
    def expanded_values_per_token(self) -> int:
        """The number of values in one token's keys and values of all heads."""
        return self.heads * (self.key_dim + self.shared_dim + self.value_dim)

    @property
    def operations_per_pair(self) -> int:
        """The floating point operations per query and key that it sees."""
        latent = self.projection.in_features
        return 2 * self.heads * (self.shared_dim + 2 * latent)

    def absorbed(self, query: Tensor) -> Tensor:
        """Return queries [heads, tokens, key_dim + shared_dim] as they ask [shared | latent]."""
        latent = self.projection.in_features
        output = query.new_empty(*query.shape[:2], self.shared_dim + latent)
        output[..., : self.shared_dim] = query[..., self.key_dim :]
        keys = self._heads(query.dtype)[:, : self.key_dim]
        output[..., self.shared_dim :] = torch.bmm(query[..., : self.key_dim], keys)
        return output

    def expanded(self, attended: Tensor) -> Tensor:
        """Return the attention's output [tokens, heads, value_dim]; what was attended are weighted
        sums of the shared key and the latent, [tokens, heads, shared_dim + latent]."""
        values = self._heads(attended.dtype)[:, self.key_dim :]
        latents = attended[..., self.shared_dim :].transpose(0, 1)
        return torch.bmm(latents, values.transpose(1, 2)).transpose(0, 1)

    def _heads(self, dtype: torch.dtype) -> Tensor:
        """Return the projection's weight: [heads, key + value, latent]."""
        weight = self.projection.weight.to(dtype)  # its own dtype, but for the self-test
        return weight.view(self.heads, -1, self.projection.in_features)
