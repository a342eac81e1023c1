"""A request that wants to know how its prompt is linked."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np
from torch import Tensor

from kvlinker.engine.base import GenerationRequest
from kvlinker.engine.cost import CostModel
from kvlinker.engine.future_request import FutureRequest
from kvlinker.errors import KVLinkerError
from kvlinker.linking.explanation import Explanation, LinkCost, layer_masks, layer_ranges, linked_segments
from kvlinker.linking.plan import LinkPlan, probe_plan

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
        plan, prompt, refinement = self.plan, self.plan.prompt, self.sequence.refinement
        dropped = [] if refinement is None else refinement.dropped
        shown = () if refinement is None else refinement.shown
        masks = layer_masks(plan, self._layers, dropped)
        usage = self.usage()
        probed = self._flops(probe_plan(prompt, plan.policy)) if plan.policy.probes else 0.0
        return Explanation(
            policy=self.request.policy.name,
            settled=plan.policy.name,
            forecast=self._link.forecast,
            tokens=plan.length,
            segments=linked_segments(prompt),
            layers=layer_ranges(prompt, masks),
            scores=(*plan.policy.explain(prompt, self._link.evidence), *shown),
            cost=LinkCost(
                cached_tokens=usage.cached_tokens,
                recomputed_tokens=usage.recomputed_tokens,
                fresh_tokens=usage.fresh_tokens,
                flops=self._cost.flops(masks) + probed,
                full_flops=self._cost.flops([np.ones(plan.length, dtype=np.bool_)] * self._layers),
            ),
        )

    def _flops(self, plan: LinkPlan) -> float:
        return self._cost.flops(layer_masks(plan, self._layers, []))
