"""The model on a batch of runs: places chunks layer by layer, writes the pool, attends by position."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvlinker.engine.anatomy import LayerShape
from kvlinker.engine.attention import AttentionOptions, attend
from kvlinker.engine.batch import Batch, Placed
from kvlinker.engine.grouping import group_queries
from kvlinker.engine.interception import RotaryFunction, intercepted
from kvlinker.engine.pool import KVPool
from kvlinker.engine.profile import Profile
from kvlinker.engine.rotary import Rotary


class Runner:
    """Runs one model over one KV pool. Not thread safe: the engine's thread owns it."""

    def __init__(self, model: Any, layers: Sequence[LayerShape], pool: KVPool) -> None:
        """``model`` is a transformers causal language model whose attention is kvlinker's."""
        self._model = model
        self._layers = tuple(layers)
        self.pool = pool
        self.device = pool.keys[0].device
        self.profile: Profile | None = None

    @torch.inference_mode()
    def step(self, batch: Batch) -> Tensor:
        """Compute all runs; returns the logits [runs that want them, vocabulary], in batch order, fp32."""
        ids = torch.from_numpy(np.concatenate([run.tokens for run in batch.runs]))
        positions = torch.cat([torch.arange(run.start, run.end) for run in batch.runs])
        ends = np.cumsum([len(run.tokens) for run in batch.runs])
        wanted = torch.tensor([end - 1 for run, end in zip(batch.runs, ends, strict=True) if run.wants_logits])
        step = _Step(self._layers, self.pool, batch, positions.to(self.device), self.profile)
        with intercepted(step):
            output = self._model(
                input_ids=ids[None].to(self.device),
                position_ids=positions[None].to(self.device),
                use_cache=False,
                logits_to_keep=wanted.to(self.device) if len(wanted) else 1,
            )
        logits: Tensor = output.logits[0].float()
        return logits[: len(wanted)]


class _Step:
    """The interceptor of one forward pass."""

    def __init__(
        self,
        layers: tuple[LayerShape, ...],
        pool: KVPool,
        batch: Batch,
        positions: Tensor,
        profile: Profile | None,
    ) -> None:
        self._layers = layers
        self._pool = pool
        self._batch = batch
        self._profile = profile
        self._slots = torch.cat([torch.arange(run.slot + run.start, run.slot + run.end) for run in batch.runs]).to(
            positions.device
        )
        self._positions = positions
        self._groups = group_queries(batch, positions.device)
        self._length = max(
            max(run.end for run in batch.runs),
            max((placed.rotary_start + placed.last - placed.first for placed in batch.placed), default=0),
        )
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    def rotary(self, apply: RotaryFunction, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
        """The tables that were traced at load stand in for the model's own."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        rotary = self._layers[index].rotary
        with self._timed("place"):
            for placed in self._batch.placed:
                self._place(index, rotary, placed)
        with self._timed("attention"):
            return self._attend_runs(index, rotary, query[0], key[0], value[0], _options(query, options))[None]

    def _attend_runs(
        self, index: int, rotary: Rotary | None, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        rotated_query, rotated_key = query, key
        if rotary is not None:
            cos, sin = self._tables_of(rotary)[2:]
            rotated_query = torch.empty_like(query, memory_format=torch.contiguous_format)
            rotated_key = torch.empty_like(key, memory_format=torch.contiguous_format)
            rotary.rotate(query, cos, sin, rotated_query)
            rotary.rotate(key, cos, sin, rotated_key)
        pool_key, pool_value = self._pool.keys[index], self._pool.values[index]
        pool_key.index_copy_(1, self._slots, rotated_key)
        pool_value.index_copy_(1, self._slots, value)
        output = query.new_empty(query.shape[1], query.shape[0], value.shape[2])  # [tokens, heads, value_dim]
        for group in self._groups:
            seen = slice(group.slot, group.slot + group.queries.last + 1)
            attended = attend(
                group.queries, rotated_query[:, group.rows], pool_key[:, seen], pool_value[:, seen], options
            )
            output[group.rows] = attended.transpose(0, 1)
        self._capture(index, key, value)
        return output

    def _capture(self, index: int, key: Tensor, value: Tensor) -> None:
        begin = 0
        for run in self._batch.runs:
            rows = slice(begin, begin + len(run.tokens))
            begin = rows.stop
            if run.capture is not None:
                run.capture.record(index, run.start, key[:, rows], value[:, rows])

    def _place(self, index: int, rotary: Rotary | None, placed: Placed) -> None:
        layer = placed.kv.layers[index]
        slots = slice(placed.slot, placed.slot + placed.last - placed.first)
        key = layer.key[:, placed.first : placed.last].to(self._pool.keys[index].device, non_blocking=True)
        if rotary is None:
            self._pool.keys[index][:, slots] = key
        else:
            positions = slice(placed.rotary_start, placed.rotary_start + placed.last - placed.first)
            cos, sin = self._tables_of(rotary)[:2]
            rotary.rotate(key, cos[positions], sin[positions], self._pool.keys[index][:, slots])
        self._pool.values[index][:, slots] = layer.value[:, placed.first : placed.last]

    def _tables_of(self, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """cos and sin of all positions of this step, and of its active tokens."""
        if id(rotary) not in self._tables:
            cos, sin = rotary.tables(self._length)
            self._tables[id(rotary)] = (cos, sin, cos[self._positions], sin[self._positions])
        return self._tables[id(rotary)]

    def _timed(self, part: str) -> AbstractContextManager[None]:
        return self._profile.timed(part) if self._profile is not None else nullcontext()


def _options(query: Tensor, options: dict[str, Any]) -> AttentionOptions:
    scaling = options.get("scaling")
    return AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
