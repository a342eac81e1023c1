"""Describes an attention layer of vLLM's: its heads, its options, and how KV is written into its
cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from vllm.model_executor.layers.attention import Attention

from kvlinker.engines.contract.attention import AttentionOptions


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of this worker. ``first_head`` is its first KV head among all of the
    layer's, ``group`` the number of the KV cache group whose blocks it uses, ``rotary`` what
    applies the rotary embedding to its keys, None if there is none, or before a pass was seen."""

    name: str
    module: Any
    heads: int
    key_dim: int
    value_dim: int
    first_head: int
    total_heads: int
    group: int = 0
    rotary: Any | None = None

    keeps_latents: ClassVar[bool] = False
    """True if all heads attend to one latent of each token (see ``LatentLayer``)."""

    @property
    def query_heads(self) -> int:
        """The number of the layer's query heads that this worker has."""
        return int(self.module.num_heads)

    @property
    def options(self) -> AttentionOptions:
        """The options of the layer's attention: scale, window, soft cap, sinks."""
        implementation = self.module.impl
        return AttentionOptions(
            scale=float(implementation.scale),
            window=self.module.sliding_window,
            softcap=getattr(implementation, "logits_soft_cap", None) or None,
            sinks=getattr(implementation, "sinks", None),
        )

    @property
    def scales(self) -> tuple[Tensor, Tensor]:
        """The factors by which stored keys and values are multiplied, in a KV cache in fp8; 1 in
        others. They are the layer's own tensors, on its device."""
        return self.module._k_scale, self.module._v_scale

    def arguments_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value of a call of the layer's module."""
        return first_of(args, kwargs, ("query", "key", "value"))

    def by_heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return a call's ``key`` and ``value`` as [tokens, heads, dim]."""
        return (
            key.reshape(-1, self.heads, self.key_dim),
            value.reshape(-1, self.heads, self.value_dim),
        )

    def queries(self, query: Tensor) -> Tensor:
        """Return a call's ``query`` as attention multiplies it: [tokens, query_heads, dim]."""
        return query.reshape(-1, self.query_heads, self.key_dim)

    def query_operand(self, key: Tensor, value: Tensor) -> Tensor:
        """Return the tensor that queries are multiplied by, from a ``key`` and a ``value``
        [tokens, heads, dim]."""
        return key

    def cache_views(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values [blocks, block_size, heads, dim] as backends know to lay them out
        in the layer's cache, which vLLM shapes [blocks, heads, block_size, 2 * dim]."""
        cache = self.module.kv_cache
        if cache.shape[1] == self.heads and cache.shape[-1] == 2 * self.key_dim:
            key, value = cache.transpose(1, 2).split(self.key_dim, dim=-1)
            yield key, value
            if cache.is_contiguous():
                behind = cache.view(*cache.shape[:2], -1, self.key_dim)
                key, value = behind.transpose(1, 2).chunk(2, dim=1)
                yield key, value
                yield _view_dims_first(key), value
        elif cache.shape[1] == 2 * self.heads:
            key, value = cache.transpose(1, 2).split(self.heads, dim=2)
            yield key, value

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write ``key`` and ``value`` [tokens, heads, dim] into the KV cache."""
        self.module.impl.do_kv_cache_update(self.module, key, value, self.module.kv_cache, slots)


def _view_dims_first(key: Tensor) -> Tensor:
    """Return keys [blocks, block_size, heads, dim] of which the same memory has, in each block and
    head, all slots' first numbers before all second ones, as vLLM's attention on CPUs takes
    them."""
    blocks, block_size, heads, dim = key.shape
    return key.transpose(1, 2).view(blocks, heads, dim, block_size).permute(0, 3, 1, 2)


def first_of(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], names: tuple[str, str, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a call's first three arguments, which have these names."""
    one, two, three = (*args, *(kwargs[name] for name in names if name in kwargs))[:3]
    return one, two, three


def unplaceable(module: Any, longest: int) -> str | None:
    """Return why KV cannot be placed in an attention layer, for prompts of up to ``longest``
    tokens; None if it can."""
    if not isinstance(module, Attention):
        return f"its attention is vLLM's {type(module).__name__}"
    backend = module.impl
    if not hasattr(backend, "do_kv_cache_update"):
        return (
            f"{type(backend).__name__} writes KV only while it attends; choose another"
            " attention_backend"
        )
    cut = getattr(module, "attention_chunk_size", None)
    if cut is not None and longest > cut:
        return (
            f"it is cut every {cut} positions (attention_chunk_size), and max_model_len is"
            f" {longest}; set max_model_len to {cut}"
        )
    if getattr(backend, "alibi_slopes", None) is not None:
        return "it has ALiBi, whose attention kvlinker does not know"
    return None
