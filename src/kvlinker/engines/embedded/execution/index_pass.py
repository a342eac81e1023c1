"""Lets the indexers of a model pick the tokens that queries see, in one forward pass over a batch:
from the whole linked prompt, wherever its KV was computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.attention.kernel import View
from kvlinker.engines.embedded.attention.picked import Picked, by_position
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.embedded.model.indexers import Indexer, IndexerCall, Queries
from kvlinker.engines.embedded.model.interception import intercepted
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall

PAIRS_AT_ONCE = 1 << 20
"""The most queries times tokens that an indexer scores at once: models keep a number for each, and
for each head of the indexer."""


class IndexPass:
    """Runs indexers when attention needs their picks: then it is known which tokens policies have
    dropped in that layer."""

    def __init__(self, layers: Sequence[LayerShape], slots: NDArray[np.int64]) -> None:
        """``slots`` are those of all tokens of the pass."""
        self._layers = layers
        self._slots = torch.from_numpy(slots)
        self._call: IndexerCall | None = None
        self._picked: dict[object, tuple[NDArray[np.int64], Tensor]] = {}
        """By sequence, the positions of its queries, ascending, and the picks for them: [groups of
        heads, queries, length]."""

    def begin(self, call: IndexerCall) -> Tensor:
        """Note a call of the layer whose attention comes next."""
        self._call = call
        return call.nothing()

    def pick(
        self,
        index: int,
        batch: Batch,
        views: Sequence[View],
        segments: Sequence[Tensor],
        pool: Tensor,
        *,
        hidden_rows: Tensor,
        pass_rows: Tensor,
    ) -> Tensor:
        """Let the indexer of layer ``index`` pick for all tokens of ``batch``, and write what it
        keeps of them into ``pool`` [1, slots, dim]; return that, [1, tokens, dim].

        ``segments`` [1, tokens, dim] have what is kept of what the ``views`` show. The batch's
        tokens are the ``hidden_rows`` of the hidden states that the indexer got, and the
        ``pass_rows`` of all tokens of the pass.
        """
        call, self._call = self._call, None
        indexer = self._layers[index].indexer
        assert call is not None, "an indexer is called before its attention"
        assert indexer is not None, "it has been seen before"
        positions, self._picked = batch.positions, {}
        kept = pool.new_empty(len(positions), indexer.dim)
        for owner, rows in batch.owner_rows:
            mine = positions[rows]
            seen = [view for view in views if view.rows == rows]
            linked = by_position(seen, segments, int(mine[-1]) + 1)[0]
            if indexer.rotary is not None:
                linked = indexer.rotated(linked, *indexer.rotary.tables(len(linked)))
            parts = []
            for part in _parts(mine, scattered=call.takes_scattered):
                at = slice(rows.start + part.start, rows.start + part.stop)
                queries = Queries(owner, mine[part], hidden_rows[at], pass_rows[at])
                own = _Own(indexer, linked, queries.positions)
                with intercepted(own):
                    mask = call.picked(queries, own.linked, indexer.handed(queries.length))
                kept[at] = own.kept.to(kept.dtype)
                parts.append(torch.nn.functional.pad(mask, (0, len(linked) - queries.length)))
            self._picked[owner] = mine, torch.cat(parts, dim=1)
        slots = self._slots.to(pool.device)[pass_rows]
        pool[:, slots] = kept
        return kept[None]

    def of(self, batch: Batch) -> tuple[Picked, ...]:
        """Return the last picks for all tokens of ``batch``: those for which it was picked, or some
        of them."""
        positions, found = batch.positions, []
        for owner, rows in batch.owner_rows:
            known, mask = self._picked[owner]
            if rows.stop - rows.start < len(known):
                mask = mask[:, np.searchsorted(known, positions[rows])]
            found.append(Picked(rows, mask))
        return tuple(found)


class _Own:
    """Steps into one call of an indexer: the model rotates by its own tables, and what it keeps of
    new tokens, un-rotated, is noted."""

    def __init__(self, indexer: Indexer, linked: Tensor, positions: NDArray[np.int64]) -> None:
        """``linked`` [tokens, dim] are what is kept of all of a sequence's tokens, to which what is
        kept of those at ``positions`` is added."""
        self._indexer = indexer
        self._linked = linked
        self._positions = positions
        self._turned: Tensor | None = None
        self.kept = linked[:0]

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Rotate as the model does."""
        if self._indexer.rotary is not None:
            self._turned = form.rotation(args, kwargs).key
        return form.function(*args, **kwargs)

    def linked(self, rotated: Tensor) -> Tensor:
        """Return what is kept of all tokens up to the last of the new ones, [length, dim], where
        that of the new ones is ``rotated``."""
        self.kept = rotated
        if self._indexer.rotary is not None:
            assert self._turned is not None, "it was rotated when it was seen before"
            width, at = self._turned.shape[-1], self._indexer.offset
            self.kept = rotated.clone()
            self.kept[:, at : at + width] = self._turned.reshape(-1, width)
        self._linked[self._positions] = rotated.to(self._linked.dtype)
        return self._linked[: int(self._positions[-1]) + 1].to(rotated.dtype)

    def index(self, call: IndexerCall) -> Tensor:
        raise LookupError("an indexer in an indexer")

    def attend(self, *_: Any) -> Tensor:
        raise LookupError("attention in an indexer")

    def convolve(self, call: ConvolutionCall) -> Tensor:
        raise LookupError("a convolution in an indexer")

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        raise LookupError("a rule in an indexer")


def _parts(positions: NDArray[np.int64], *, scattered: bool) -> Iterator[slice]:
    """Yield which of the queries at these positions are picked for together: as many as
    PAIRS_AT_ONCE allows, and neighbours alone unless they may be ``scattered``."""
    begin = 0
    while begin < len(positions):
        end = begin + max(1, PAIRS_AT_ONCE // (int(positions[-1]) + 1))
        end = min(end, len(positions))
        if not scattered:
            gaps = np.flatnonzero(np.diff(positions[begin:end]) > 1)
            end = begin + int(gaps[0]) + 1 if len(gaps) else end
        yield slice(begin, end)
        begin = end
