"""Compares which tokens indexers pick in the engine and in the model's own pass, where scores
differ by rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.engines.embedded.model.indexers import Picking, Picks, is_indexer

Recorded = dict[tuple[object, nn.Module, int], Tensor]
"""The picks of an indexer in a text for the query at a position: [..., picked], -1 for none."""

PICK_LIMIT = 8
"""The most tokens, or blocks of them, that a query sees in a self-test, so that its short texts are
long enough for something to be left out."""


class Referee(Picks):
    """Records what a model's own passes pick, and has the engine's passes pick the same.

    Where scores are all but equal, rounding decides which tokens are picked, and another choice is
    as good, but changes all that follows. So the choice is the model's, and ``error`` says by how
    much the engine's scores would have chosen otherwise.
    """

    def __init__(self) -> None:
        self._recorded: Recorded = {}
        self.error = 0.0

    @contextmanager
    def recording(self, model: nn.Module, text: object) -> Iterator[None]:
        """Record what the indexers of ``model`` pick in its own passes over the ``text``, for the
        engine's passes whose owner that is."""
        own = _Recording(self._recorded, text)
        entered: list[ExitStack] = []

        def enter(module: nn.Module, args: Any) -> None:
            entered.append(ExitStack())
            entered[-1].enter_context(Picking(own, module))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            entered.pop().close()

        with ExitStack() as hooks:
            for part in model.modules():
                if is_indexer(type(part)):
                    hooks.enter_context(part.register_forward_pre_hook(enter))
                    hooks.enter_context(part.register_forward_hook(leave, always_call=True))
            yield

    def highest(
        self,
        module: nn.Module,
        owner: object,
        positions: NDArray[np.int64],
        scores: Tensor,
        k: int,
    ) -> Tensor:
        mine = super().highest(module, owner, positions, scores, min(k, PICK_LIMIT))
        if (owner, module, int(positions[0])) not in self._recorded:
            return mine
        recorded = [self._recorded[owner, module, int(position)] for position in positions]
        theirs = torch.stack(recorded, -2)[..., : mine.shape[-1]].to(mine.device)
        chosen = torch.where(theirs < 0, mine, theirs.clamp(max=scores.shape[-1] - 1))
        best, found = (scores.gather(-1, each) for each in (mine, chosen))
        found = found.sort(dim=-1, descending=True).values
        self.error = float(np.max([self.error, _distance(best, found)]))  # NaN, if any is
        return chosen


class _Recording(Picks):
    """Records what a pass picks."""

    def __init__(self, recorded: Recorded, text: object) -> None:
        self._recorded = recorded
        self._text = text

    def highest(
        self,
        module: nn.Module,
        owner: object,
        positions: NDArray[np.int64],
        scores: Tensor,
        k: int,
    ) -> Tensor:
        indices = super().highest(module, owner, positions, scores, min(k, PICK_LIMIT))
        seen = scores.gather(-1, indices) > torch.finfo(scores.dtype).min
        rows = indices.masked_fill(~seen, -1).unbind(-2)
        for position, row in zip(positions.tolist(), rows, strict=True):
            self._recorded[self._text, module, position] = row
        return indices


def _distance(best: Tensor, found: Tensor) -> float:
    """Return how far the scores of the chosen tokens are from the highest, relative to the largest:
    infinite if an invisible token was chosen instead of a visible one."""
    lowest = torch.finfo(best.dtype).min
    seen, differs = best > lowest, (best > lowest) != (found > lowest)
    if differs.any():
        return float("inf")
    inside = seen & best.isfinite() & found.isfinite()
    if not inside.any():
        return 0.0
    apart = (best - found)[inside].abs().max() / best[inside].abs().max().clamp(min=1e-30)
    return float(apart)
