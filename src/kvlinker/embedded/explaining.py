"""A request that wants to know how its prompt is linked."""

from __future__ import annotations

import logging
from typing import ClassVar

from torch import Tensor

from kvlinker.embedded.future_request import FutureRequest
from kvlinker.engine.contract import GenerationRequest
from kvlinker.engine.cost import CostModel
from kvlinker.engine.explaining import explanation_of
from kvlinker.errors import KVLinkerError
from kvlinker.linking.explanation import Explanation

logger = logging.getLogger(__name__)


class Explaining(FutureRequest[Explanation]):
    """Ends with an explanation."""

    explains: ClassVar[bool] = True

    def __init__(self, request: GenerationRequest, *, layers: int, cost: CostModel) -> None:
        super().__init__(request, max_tokens=1)
        self._layers = layers
        self._cost = cost

    def accept(self, logits: Tensor) -> None:
        try:
            explanation = self._explain()
        except Exception as error:
            logger.exception("A policy could not be explained.")
            self.fail(KVLinkerError(f"Policy {self.request.policy.name} could not be explained: {error}"))
        else:
            self.finish(explanation)

    def _explain(self) -> Explanation:
        assert self.plan is not None
        assert self.sequence is not None
        assert self._link is not None
        return explanation_of(
            self.plan,
            self.sequence.refinement,
            self._link.evidence,
            asked=self.request.policy,
            forecast=self._link.forecast,
            layers=self._layers,
            cost=self._cost,
        )
