"""Attention over segments by Triton's kernels, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.placing import Rotation
from kvlinker.engines.embedded.attention.bundles import Bundle, bundle_views
from kvlinker.engines.embedded.attention.tiles import TileTables
from kvlinker.engines.embedded.attention.views import (
    AttentionPlan,
    KeyValue,
    Segments,
    View,
    farthest,
)
from kvlinker.engines.embedded.model.rotary import Rotary
from kvlinker.engines.gpu.attending import attend_tile, merge_partials
from kvlinker.engines.gpu.launching import (
    SMALLEST,
    addresses,
    block_of,
    is_aligned,
    on_device,
    place_kv,
)

MOST_HEADS = 16
"""The most query heads of a tile; models with latents have 128 that share one key."""

WIDE_TILE = 64
"""Queries times heads of a tile where there are many; otherwise, tiles are as small as tensor cores
allow."""

WIDE_VALUES = 256
"""From more dimensions of a value on, a tile is small, since its sums are in registers."""

MANY_KEYS = {"BLOCK_KEYS": 64, "num_warps": 8, "num_stages": 2}
"""How the kernel is compiled: so that nothing is spilled, see ``tests/engines/gpu``."""

FEW_KEYS = {"BLOCK_KEYS": 32, "num_warps": 4, "num_stages": 1}
"""The same for values of many dimensions."""


@dataclass(frozen=True)
class TritonPlan(AttentionPlan):
    """Holds the tables for the kinds of layers that have been computed."""

    bundles: tuple[Bundle, ...]
    farthest: int
    """The most positions by which a query is rotated, or a key."""

    tables: dict[tuple[int | None, int, int, int], TileTables] = field(default_factory=dict)
    """By window, and how tiles are made."""

    written: list[Tensor] = field(default_factory=list)
    """The table of tokens to write, once it is on the device."""


class TritonAttention:
    """Implements ``AttentionKernel`` with Triton's kernels, for rotary embeddings whose pairing is
    known.

    A tile's program reads each key once for all its queries, of several requests where they share
    the chunk, and rotates the queries itself; nothing is masked beforehand. Latents are attended to
    as they are kept.
    """

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> TritonPlan:
        seen = AttentionPlan.of(views, positions)
        return TritonPlan(
            seen.views,
            np.ascontiguousarray(positions),
            bundle_views(seen.views),
            farthest=max(
                [int(positions.max(initial=0)), *(farthest(view, positions) for view in seen.views)]
            ),
        )

    def write(
        self,
        plan: AttentionPlan,
        key: Tensor,
        value: Tensor,
        slots: Tensor,
        rotary: Rotary | None,
        into: KeyValue,
    ) -> None:
        assert isinstance(plan, TritonPlan), plan
        if not plan.written:
            rows = np.arange(len(plan.positions))
            known = on_device(np.stack([rows * 0, rows, plan.positions]), key.device)
            plan.written.append(torch.cat([known, slots[None]]))
        caches = [(into[0].transpose(0, 1)[None], into[1].transpose(0, 1)[None])]
        source = _contiguous(key), _contiguous(value)
        place_kv([[source]], caches, plan.written[0], _rotation(rotary, plan.farthest))

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
        assert isinstance(plan, TritonPlan), plan
        query = _contiguous(query)
        rotation = _rotation(rotary, plan.farthest)
        width = 0 if rotation is None else 2 * rotation.cos.shape[1]
        latent = all(key is value for key, value in segments)
        skipped = width if latent else 0
        heads, key_dim = query.shape[0], query.shape[2]
        value_dim = output.shape[2] - skipped
        group = heads // segments[0][0].shape[0] if segments else 1
        tile_heads = min(MOST_HEADS, 1 << (group - 1).bit_length())
        tile = SMALLEST
        if len(plan.positions) * tile_heads > SMALLEST and value_dim <= WIDE_VALUES:
            tile = WIDE_TILE
        tables = self._tables(plan, query, options.window, group, tile // tile_heads, tile_heads)
        if latent or not tables.sees_all:
            output.zero_()
        if not tables.tiles:
            return
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        partials = query.new_empty(tables.partial_rows, heads, value_dim, dtype=torch.float32)
        lses = query.new_empty(tables.partial_rows, heads, dtype=torch.float32)
        layer = on_device(np.array(addresses(segments), np.int64), query.device)
        value_block = block_of(value_dim)
        attend_tile[tables.tiles, heads // group * -(-group // tile_heads)](
            query,
            output,
            partials,
            lses,
            lses if rotation is None else rotation.cos,
            lses if rotation is None else rotation.sin,
            lses if sinks is None else sinks,
            layer,
            *tables.attended,
            *query.stride()[:2],
            heads,
            group,
            options.scale,
            options.softcap or 0.0,
            WIDTH=width,
            KEY_DIM=key_dim,
            VALUE_DIM=value_dim,
            INTERLEAVED=rotation is not None and rotation.interleaved,
            LATENT=latent,
            SOFTCAP=options.softcap is not None,
            SINKS=sinks is not None,
            ALIGNED=is_aligned([tensor for pair in segments for tensor in pair]),
            PAIRS_BLOCK=block_of(width // 2),
            REST_BLOCK=block_of(key_dim - width),
            VALUE_BLOCK=value_block,
            BLOCK_ROWS=tile // tile_heads,
            BLOCK_HEADS=tile_heads,
            **(FEW_KEYS if value_dim > WIDE_VALUES else MANY_KEYS),
        )
        if tables.targets:
            merge_partials[tables.targets, heads](
                output,
                partials,
                lses,
                lses if sinks is None else sinks,
                *tables.merged,
                heads,
                VALUE_DIM=value_dim,
                SKIPPED=skipped,
                SINKS=sinks is not None,
                VALUE_BLOCK=value_block,
            )

    def _tables(
        self,
        plan: TritonPlan,
        query: Tensor,
        window: int | None,
        group: int,
        tile_rows: int,
        tile_heads: int,
    ) -> TileTables:
        programs = len(query) // group * -(-group // tile_heads)
        kind = window, tile_rows, tile_heads, programs
        if kind not in plan.tables:
            plan.tables[kind] = TileTables(
                plan.bundles,
                plan.positions,
                window=window,
                tile_rows=tile_rows,
                programs=programs,
                device=query.device,
            )
        return plan.tables[kind]


def _rotation(rotary: Rotary | None, most: int) -> Rotation | None:
    """Return the tables for distances up to ``most``."""
    if rotary is None:
        return None
    return Rotation(*rotary.tables(most + 1), interleaved=rotary.pairing == "interleaved")


def _contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor with neighbouring dimensions of a head."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
