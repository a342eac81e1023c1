"""A request that wants to know how its prompt is linked."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from kvlinker.embedded.future_request import FutureRequest
from kvlinker.engine.contract import GenerationRequest
from kvlinker.engine.cost import CostModel
from kvlinker.errors import KVLinkerError
from kvlinker.linking.explanation import Explanation


class Explaining(FutureRequest[Explanation]):
    """Ends with an explanation."""

    explains: ClassVar[bool] = True

    def __init__(self, request: GenerationRequest, *, layers: int, cost: CostModel) -> None:
        super().__init__(request, max_tokens=1)
        self._layers = layers
        self._cost = cost

    def accept(self, logits: Tensor) -> None:
        assert self.sequence is not None
        assert self.link is not None
        try:
            refinement = self.sequence.refinement
            explanation = self.link.explanation(refinement, layers=self._layers, cost=self._cost)
        except KVLinkerError as error:
            self.fail(error)
        else:
            self.finish(explanation)
