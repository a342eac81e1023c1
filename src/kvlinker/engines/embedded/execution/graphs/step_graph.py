"""One graph of all kernels of a step: the tables that it reads at fixed addresses, and the pass
that is captured."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.attention.kernel import AttentionPlan
from kvlinker.engines.embedded.attention.tiles import PlacedTables, TileTables
from kvlinker.engines.embedded.attention.triton_attention import (
    TileKind,
    TritonPlan,
    attend_tiles,
    cache_of,
    dense_rows,
    rotation_of,
)
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.anatomy import LayerShape, kept_by
from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.interception import intercepted
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall
from kvlinker.engines.gpu.launching import place_kv, placing_addresses

SEGMENT_MINIMUM = 16
TILE_MINIMUM = 16
"""The fewest segments, and the fewest tiles, that a graph has room for."""

ALIGNMENT = 16
"""The numbers to a multiple of which sections of memory begin, so that kernels read whole lines."""

PLACING_FIELDS = 16
"""The numbers of ``placing_addresses`` for one layer."""

WANTED = (1, 4, 16, 64)
"""The rows whose logits a graph computes, where that is enough."""

Array = NDArray[np.int64]
Replay = Callable[[], object]

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the model's pass over token ids and positions [rows] each, and returns the logits of the
rows with these indices: [indices, vocabulary]."""

TablesName = tuple[int, TileKind]
"""The number of a step's plan, and a kind of layers that it has tables for."""


class StepSize(NamedTuple):
    """The sizes that the steps of one graph have in common.

    A graph may have more rows than its step, which then are nobody's: they write and see nothing.
    """

    rows: int
    wanted: int
    """The rows of the graph, and those whose logits are wanted."""

    plans: tuple[int, ...]
    """For each layer, the number of the plan that its attention has."""

    @classmethod
    def of(cls, batch: Batch, plans: tuple[int, ...]) -> StepSize:
        """Return the size of the graph for a batch: a quarter more rows than that, at most."""
        rows = len(batch.slots)
        part = 1 << max(0, (rows - 1).bit_length() - 3)
        wanted = len(batch.logit_rows)
        most = next((size for size in WANTED if size >= wanted), _power(wanted))
        return cls(-(-rows // part) * part, most, plans)


class StepTables:
    """All that one step tells the kernels, in the host's memory."""

    def __init__(
        self,
        batch: Batch,
        size: StepSize,
        plans: Sequence[AttentionPlan],
        segments: Array,
        layers: Sequence[LayerShape],
        windows: Sequence[int | None],
    ) -> None:
        """``segments`` are the addresses of all segments: [layers, segments, 6]."""
        self.size = size
        self.segments = segments
        self.names: list[TablesName] = []
        """For each layer, its tables."""

        self.tiles: dict[TablesName, TileTables] = {}
        self.farthest = 0
        for layer, window, number in zip(layers, windows, size.plans, strict=True):
            kind = TileKind.of(
                size.rows,
                heads=layer.query_heads,
                kv_heads=layer.kv_heads,
                value_dim=layer.value_dim,
                window=window,
            )
            self.names.append((number, kind))
            if self.names[-1] not in self.tiles:
                plan = plans[number]
                assert isinstance(plan, TritonPlan), plan
                self.tiles[number, kind] = plan.tables(kind)
                self.farthest = max(self.farthest, plan.farthest)
        rotaries = dict.fromkeys(layer.rotary for layer in layers if layer.rotary is not None)
        self.rotations = tuple(
            table.data_ptr() for each in rotaries for table in each.tables(self.farthest + 1)
        )
        """Where the tables of rotary embeddings are, now that they are long enough."""

        rows = np.arange(len(batch.slots))
        written = np.zeros((4, size.rows), np.int64)
        written[3] = -1
        written[1:, : len(rows)] = rows, batch.positions, batch.slots
        self.inputs: dict[str, Array] = {
            "ids": batch.tokens,
            "positions": batch.positions,
            "wanted": np.array(batch.logit_rows, np.int64),
            "written": written,
        }
        """The arguments of ``Forward``, and the tokens that ``place_kv`` writes."""


class _Room(NamedTuple):
    """The sizes of tile tables that there is memory for."""

    tiles: int
    targets: int
    partial_rows: int
    lengths: tuple[int, ...]
    """The lengths of ``TileTables.arrays``."""

    @classmethod
    def of(cls, tables: TileTables, kind: TileKind, rows: int, before: _Room | None) -> _Room:
        """Return room for the tables of a step with ``rows`` rows, and for what there was room for
        ``before``."""
        tiles = max(TILE_MINIMUM, _roomy(tables.tiles), 0 if before is None else before.tiles)
        targets = rows if tables.targets or (before is not None and before.targets) else 0
        lengths = [max(64, _roomy(len(each))) for each in tables.arrays]
        if before is not None:
            lengths = list(map(max, lengths, before.lengths))
        lengths[0], lengths[3] = tiles * kind.rows, tiles * 3
        lengths[5], lengths[6] = targets, targets + 1
        return cls(tiles, targets, tiles * kind.rows if targets else 0, tuple(lengths))

    def holds(self, tables: TileTables) -> bool:
        return all(
            len(each) <= length for each, length in zip(tables.arrays, self.lengths, strict=True)
        )


PADDING = (-1, 0, 0, -1, 0, -1, 0, 0)
"""The padding of ``TileTables.arrays``: tiles without queries and visits, and targets without
owners."""


class StepGraph:
    """The graph of steps of one size, and the memory that it reads."""

    def __init__(
        self,
        step: StepTables,
        layers: Sequence[LayerShape],
        pool: KVPool,
        outgrown: StepGraph | None = None,
    ) -> None:
        """There is room for the step, and for what there was room for in the ``outgrown`` graph."""
        self._layers = layers
        self._pool = pool
        self._names = step.names
        self._farthest = step.farthest
        self._rotations = step.rotations
        self._placed = np.zeros((len(layers), PLACING_FIELDS), np.int64)
        self._replay: Replay | None = None
        size = step.size
        known = {} if outgrown is None else outgrown._rooms
        self._rooms: dict[TablesName, _Room] = {
            name: _Room.of(tables, name[1], size.rows, known.get(name))
            for name, tables in step.tiles.items()
        }
        segments = max(SEGMENT_MINIMUM, _roomy(step.segments.shape[1]))
        self._segments: int = max(segments, 0 if outgrown is None else outgrown._segments)
        self._memory = _Memory(
            {
                "ids": size.rows,
                "positions": size.rows,
                "wanted": size.wanted,
                "written": 4 * size.rows,
                "placing": len(layers) * PLACING_FIELDS,
                **{("segments", index): self._segments * 6 for index in range(len(layers))},
                **{
                    (name, part): length
                    for name, room in self._rooms.items()
                    for part, length in enumerate(room.lengths)
                },
            },
            pool.device,
        )
        self._logits = torch.empty(0)

    def takes(self, step: StepTables) -> bool:
        """Return whether there is room for a step of this size."""
        return (
            step.rotations == self._rotations
            and step.segments.shape[1] <= self._segments
            and all(self._rooms[name].holds(tables) for name, tables in step.tiles.items())
        )

    def computed(self, step: StepTables, forward: Forward) -> Tensor:
        """Compute the step by launching its kernels; returns the logits of all wanted rows."""
        self._fill(step)
        return self._pass(forward, captured=False)

    def capture(
        self, capture: Callable[[Callable[[], Tensor]], tuple[Replay, Tensor]], forward: Forward
    ) -> None:
        """Capture what computed the last step."""
        self._replay, self._logits = capture(lambda: self._pass(forward, captured=True))
        self._memory.on_device("placing").copy_(torch.from_numpy(self._placed.reshape(-1)))

    def replayed(self, step: StepTables) -> Tensor:
        """Compute a step that it ``takes``; returns the logits of all wanted rows, which the next
        step overwrites."""
        assert self._replay is not None, "it has been captured"
        self._fill(step)
        self._replay()
        return self._logits

    def _fill(self, step: StepTables) -> None:
        memory = self._memory
        memory.wait()
        for key, values in step.inputs.items():
            memory.fill(key, values, 0)
        for index, values in enumerate(step.segments):
            memory.fill(("segments", index), values, 0)
        memory.fill("placing", self._placed, 0)
        for name, tables in step.tiles.items():
            for part, (values, padding) in enumerate(zip(tables.arrays, PADDING, strict=True)):
                memory.fill((name, part), values, padding)
        memory.copy()

    def _pass(self, forward: Forward, *, captured: bool) -> Tensor:
        ids, positions, wanted = map(self._memory.on_device, ("ids", "positions", "wanted"))
        with intercepted(_Pass(self, captured=captured)):
            return forward(ids, positions, wanted)

    def _tables(self, name: TablesName) -> PlacedTables:
        room = self._rooms[name]
        parts = range(len(room.lengths))
        return PlacedTables.of(
            [self._memory.on_device((name, part)) for part in parts],
            tiles=room.tiles,
            targets=room.targets,
            partial_rows=room.partial_rows,
            sees_all=False,
        )


class _Pass:
    """Writes and attends in one pass as the tables in a graph's memory say, whatever they have."""

    def __init__(self, graph: StepGraph, *, captured: bool) -> None:
        self._graph = graph
        self._captured = captured
        self._attended = 0
        self._kept_by = kept_by(graph._layers)
        self._placing = graph._memory.on_device("placing").view(-1, PLACING_FIELDS)

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do nothing: keys are rotated as they are written, queries as they attend."""

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """See ``Interceptor.attend``."""
        graph, index = self._graph, self._attended
        self._attended += 1
        shape, kept = graph._layers[index], self._kept_by[index]
        rotation = rotation_of(shape.rotary, graph._farthest)
        if shape.source is None:
            source = dense_rows(key[0]), dense_rows(value[0])
            cache = cache_of((graph._pool.keys[kept], graph._pool.values[kept]))
            graph._placed[index] = placing_addresses([[source]], [cache])
            if not self._captured:
                self._placing[index].copy_(torch.from_numpy(graph._placed[index]))
            written = graph._memory.on_device("written").view(4, -1)
            place_kv([[source]], [cache], written, rotation, table=self._placing[index])
        heads, rows = query.shape[1:3]
        output = query.new_empty(rows, heads, shape.value_dim)
        attend_tiles(
            dense_rows(query[0]),
            graph._memory.on_device(("segments", index)),
            graph._tables(graph._names[index]),
            graph._names[index][1],
            rotation,
            AttentionOptions.of_call(query, options),
            latent=False,
            aligned=True,
            output=output,
        )
        return output[None]

    def index(self, call: IndexerCall) -> Tensor:
        raise NotImplementedError("no graph computes indexers")

    def convolve(self, call: ConvolutionCall) -> Tensor:
        raise NotImplementedError("no graph computes layers that keep a state")

    def recur(self, call: RuleCall) -> tuple[Tensor, None]:
        raise NotImplementedError("no graph computes layers that keep a state")


class _Memory:
    """Numbers in sections: in the host's memory, from which they are copied all at once, and at
    fixed addresses of the device."""

    def __init__(self, lengths: Mapping[Hashable, int], device: torch.device) -> None:
        self._sections: dict[Hashable, slice] = {}
        end = 0
        for name, length in lengths.items():
            self._sections[name] = slice(end, end + length)
            end += -(-length // ALIGNMENT) * ALIGNMENT
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(end, dtype=torch.int64, pin_memory=on_gpu)
        self._numbers: Array = self._host.numpy()
        self._device = torch.zeros(end, dtype=torch.int64, device=device)
        self._copied: torch.cuda.Event | None = None
        if on_gpu:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def on_device(self, name: Hashable) -> Tensor:
        """Return a section on the device."""
        return self._device[self._sections[name]]

    def wait(self) -> None:
        """Return when the host's memory may be written to."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill(self, name: Hashable, values: Array, padding: int) -> None:
        """Write values at the beginning of a section, and ``padding`` behind them."""
        section, flat = self._numbers[self._sections[name]], values.reshape(-1)
        section[: len(flat)] = flat
        section[len(flat) :] = padding

    def copy(self) -> None:
        """Copy all sections to the device, before what the calling thread computes from now on."""
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


def _roomy(count: int) -> int:
    """Return a power of two that leaves room for half as many more."""
    return _power(count + count // 2)


def _power(count: int) -> int:
    """Return the power of two that is not below a count."""
    return 1 << max(0, count - 1).bit_length()
