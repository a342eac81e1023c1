"""Attention over segments by Triton's kernels, on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.placing import Rotation
from kvlinker.engines.embedded.attention.kernel import (
    AttentionPlan,
    Bundle,
    KeyValue,
    Segments,
    View,
    bundle_views,
    farthest,
    seen_views,
)
from kvlinker.engines.embedded.attention.tiles import PlacedTables, TileTables
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


class TileKind(NamedTuple):
    """How a layer's queries are cut into tiles."""

    window: int | None
    rows: int
    heads: int
    """The queries and the query heads of a tile."""

    kv_heads: int
    group: int
    """The query heads that share a key head."""

    @property
    def programs(self) -> int:
        """The programs of a tile, each for other heads."""
        return self.kv_heads * -(-self.group // self.heads)

    @classmethod
    def of(
        cls, rows: int, *, heads: int, kv_heads: int, value_dim: int, window: int | None
    ) -> TileKind:
        """Return how a layer's ``rows`` queries of ``heads`` heads are cut."""
        group = heads // kv_heads
        tile_heads = min(MOST_HEADS, 1 << (group - 1).bit_length())
        wide = rows * tile_heads > SMALLEST and value_dim <= WIDE_VALUES
        tile_rows = (WIDE_TILE if wide else SMALLEST) // tile_heads
        return cls(window, tile_rows, tile_heads, kv_heads, group)


@dataclass(frozen=True)
class TritonPlan(AttentionPlan):
    """Holds the tables for the kinds of layers that have been computed."""

    bundles: tuple[Bundle, ...]
    farthest: int
    """The most positions by which a query is rotated, or a key."""

    placed: dict[TileKind, PlacedTables] = field(default_factory=dict)

    written: list[Tensor] = field(default_factory=list)
    """The table of tokens to write, once it is on the device."""

    def tables(self, kind: TileKind) -> TileTables:
        """Return the tables for layers of a kind."""
        return TileTables(
            self.bundles,
            self.positions,
            window=kind.window,
            tile_rows=kind.rows,
            programs=kind.programs,
        )

    def placed_on(self, device: torch.device, kind: TileKind) -> PlacedTables:
        """Return the tables for layers of a kind on the device, from the first such layer on."""
        if kind not in self.placed:
            self.placed[kind] = self.tables(kind).on(device)
        return self.placed[kind]


class TritonAttention:
    """Implements ``AttentionKernel`` with Triton's kernels, for rotary embeddings whose pairing is
    known.

    A tile's program reads each key once for all its queries, of several requests where they share
    the chunk, and rotates the queries itself; nothing is masked beforehand. Latents are attended to
    as they are kept.
    """

    def plan(self, views: Sequence[View], positions: NDArray[np.int64]) -> TritonPlan:
        seen = seen_views(views)
        return TritonPlan(
            seen,
            np.ascontiguousarray(positions),
            bundle_views(seen),
            farthest=max(int(positions.max(initial=0)), farthest(seen, positions)),
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
        source = dense_rows(key), dense_rows(value)
        rotation = rotation_of(rotary, plan.farthest)
        place_kv([[source]], [cache_of(into)], plan.written[0], rotation)

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
        if not segments:
            output.zero_()
            return
        rotation = rotation_of(rotary, plan.farthest)
        latent = all(key is value for key, value in segments)
        kind = TileKind.of(
            len(plan.positions),
            heads=query.shape[0],
            kv_heads=segments[0][0].shape[0],
            value_dim=output.shape[2] - (_width(rotation) if latent else 0),
            window=options.window,
        )
        attend_tiles(
            dense_rows(query),
            on_device(np.array(addresses(segments), np.int64), query.device),
            plan.placed_on(query.device, kind),
            kind,
            rotation,
            options,
            latent=latent,
            aligned=is_aligned([tensor for pair in segments for tensor in pair]),
            output=output,
        )


def attend_tiles(
    query: Tensor,
    segments: Tensor,
    tables: PlacedTables,
    kind: TileKind,
    rotation: Rotation | None,
    options: AttentionOptions,
    *,
    latent: bool,
    aligned: bool,
    output: Tensor,
) -> None:
    """Attend to segments [segments, 6], given by their ``addresses``, as the tables say.

    ``query`` [heads, queries, key_dim] has neighbouring dimensions; ``output`` is [queries, heads,
    value_dim], where latents stand after the key's rotated dimensions. ``aligned``: all segments
    are.
    """
    heads, _, key_dim = query.shape
    width = _width(rotation)
    skipped = width if latent else 0
    value_dim = output.shape[2] - skipped
    if latent or not tables.sees_all:
        output.zero_()
    if not tables.tiles:
        return
    sinks = None if options.sinks is None else options.sinks.float().contiguous()
    partials = query.new_empty(tables.partial_rows, heads, value_dim, dtype=torch.float32)
    lses = query.new_empty(tables.partial_rows, heads, dtype=torch.float32)
    value_block = block_of(value_dim)
    attend_tile[tables.tiles, kind.programs](
        query,
        output,
        partials,
        lses,
        lses if rotation is None else rotation.cos,
        lses if rotation is None else rotation.sin,
        lses if sinks is None else sinks,
        segments,
        *tables.attended,
        *query.stride()[:2],
        heads,
        kind.group,
        options.scale,
        options.softcap or 0.0,
        WIDTH=width,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        INTERLEAVED=rotation is not None and rotation.interleaved,
        LATENT=latent,
        SOFTCAP=options.softcap is not None,
        SINKS=sinks is not None,
        ALIGNED=aligned,
        PAIRS_BLOCK=block_of(width // 2),
        REST_BLOCK=block_of(key_dim - width),
        VALUE_BLOCK=value_block,
        BLOCK_ROWS=kind.rows,
        BLOCK_HEADS=kind.heads,
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


def rotation_of(rotary: Rotary | None, most: int) -> Rotation | None:
    """Return the tables for distances up to ``most``."""
    if rotary is None:
        return None
    return Rotation(*rotary.tables(most + 1), interleaved=rotary.pairing == "interleaved")


def _width(rotation: Rotation | None) -> int:
    """Return how many dimensions are rotated."""
    return 0 if rotation is None else 2 * rotation.cos.shape[1]


def cache_of(pool: KeyValue) -> KeyValue:
    """Return keys and values [heads, slots, dim] as a cache of one block: [1, slots, heads, dim]
    each."""
    key, value = pool
    return key.transpose(0, 1)[None], value.transpose(0, 1)[None]


def dense_rows(tensor: Tensor) -> Tensor:
    """Return the tensor with neighbouring dimensions of a head."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
