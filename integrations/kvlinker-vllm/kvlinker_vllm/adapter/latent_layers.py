"""Describes a layer of vLLM's whose attention is over latents (MLA)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention import MLAAttention

from kvlinker_vllm.adapter.attention_layers import AttentionLayer, first_of


@dataclass(frozen=True, slots=True)
class LatentLayer(AttentionLayer):
    """An attention layer that keeps one latent of each token, and one key: every worker has both,
    whole.

    As the embedded engine has it, the key that all heads share is the layer's one key, and the
    latent its one value. A product with a head's key, which is a projection of the latent and after
    it the shared key, is that of the query, projected back, with the latent itself.
    """

    keeps_latents: ClassVar[bool] = True

    @classmethod
    def of(cls, name: str, module: MLAAttention, group: int) -> LatentLayer:
        """Read the layer from its module."""
        shared, latent = module.qk_rope_head_dim, module.kv_lora_rank
        return cls(
            name,
            module,
            heads=1,
            key_dim=shared,
            value_dim=latent,
            first_head=0,
            total_heads=1,
            group=group,
        )

    def arguments_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        query, latent, shared = first_of(args, kwargs, ("q", "kv_c_normed", "k_pe"))
        return query, shared, latent

    def queries(self, query: Tensor) -> Tensor:
        own = self.module.qk_nope_head_dim
        heads = query.reshape(-1, self.query_heads, own + self.key_dim)
        projected = torch.bmm(heads[..., :own].transpose(0, 1), self.module.W_UK_T)
        return torch.cat([heads[..., own:], projected.transpose(0, 1)], dim=-1)

    def query_operand(self, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([key, value], dim=-1)

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        return self.module._k_scale, self.module._k_scale

    def cache_views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values in the layer's cache, which vLLM shapes [blocks, block_size,
        latent + key]."""
        cache = self.module.kv_cache
        if cache.shape[-1] == self.value_dim + self.key_dim:
            one_head = cache[:, :, None]
            yield one_head[..., self.value_dim :], one_head[..., : self.value_dim]

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        module = self.module
        module.impl.do_kv_cache_update(
            value[:, 0], key, module.kv_cache, slots, module.kv_cache_dtype, module._k_scale
        )


def latents_unplaceable(module: Any) -> str | None:
    """Return why latents cannot be placed in an attention layer; None if they can."""
    if module.use_sparse:
        return "an indexer picks the tokens that it sees, whose keys kvlinker does not place"
    if getattr(module, "W_UK_T", None) is None:
        return (
            f"vLLM's {type(module.impl).__name__} packs the projection of its latents in a form of"
            " its own; choose another attention_backend"
        )
    return None
