"""The groups of layers whose KV vLLM keeps in the same blocks, and their metadata builders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvlinker.base.errors import UnsupportedModelError

LINKED = FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec
"""The kinds of KV caches that are linked; the last one for prompts of one chunk, of which it keeps
everything."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers whose KV is in the same blocks of ``block_size`` tokens.

    With a ``window``, each token sees that many, itself included, and vLLM keeps blocks for no
    more.
    """

    block_size: int
    window: int | None = None


def cache_groups(config: Any) -> tuple[CacheGroup, ...]:
    """Return the groups of a ``KVCacheConfig``, in order."""
    return tuple(map(_group_of, (group.kv_cache_spec for group in config.kv_cache_groups)))


def bound_groups(attention: Sequence[Sequence[Any]]) -> tuple[CacheGroup, ...]:
    """Return the groups of a worker, by the attention groups of each. Raises UnsupportedModelError
    for a kind of KV cache that cannot be linked."""
    groups: list[CacheGroup] = []
    for each in attention:
        specs = [group.kv_cache_spec for group in each]
        for spec in specs:
            if type(spec) not in LINKED:
                raise UnsupportedModelError(
                    "vLLM keeps something else than plain keys and values of this model"
                    f" ({type(spec).__name__}), so kvlinker cannot link it there; serve it with"
                    " kvlinker's own engine (--engine embedded), or with vLLM alone."
                )
        found = set(map(_group_of, specs))
        if len(found) != 1:
            raise UnsupportedModelError(
                "vLLM keeps this model's KV in blocks of several kinds at once, which kvlinker"
                " does not know; try --disable-hybrid-kv-cache-manager."
            )
        groups += found
    return tuple(groups)


def _group_of(spec: Any) -> CacheGroup:
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.first_spec
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None
    return CacheGroup(spec.block_size, window)


def own_group(group: Any, config: Any, device: torch.device) -> Any:
    """Return the group of attention layers with a metadata builder of its own.

    Builders may keep what they build in buffers that the next build overwrites, such as
    FlashAttention 3's scheduler metadata and FlashInfer's plans. Runs inside a request's first step
    are built when that step's own metadata already is, and must leave it alone.
    """
    theirs = group.get_metadata_builder()
    own = replace(group, metadata_builders=[], kernel_block_table=None, kernel_block_offsets=None)
    with set_current_vllm_config(config):
        own.create_metadata_builders(config, device, theirs.kv_cache_spec.block_size)
    (builder,) = own.metadata_builders
    if hasattr(
        builder, "set_workspace_buffer"
    ):  # scratch space, which passes use one after another
        builder.set_workspace_buffer(theirs._get_workspace_buffer())
    if hasattr(builder, "chunked_prefill_workspace"):  # the same, of latents
        builder.chunked_prefill_workspace = theirs.chunked_prefill_workspace
    return own
