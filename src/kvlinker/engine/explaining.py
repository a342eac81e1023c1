"""A request that wants to know how its prompt is linked."""

from __future__ import annotations

import logging
from typing import ClassVar

import numpy as np
from torch import Tensor

from kvlinker.engine.base import GenerationRequest
from kvlinker.engine.cost import CostModel
from kvlinker.engine.future_request import FutureRequest
from kvlinker.engine.refinement import Refinement
from kvlinker.errors import KVLinkerError
from kvlinker.linking.evidence import Evidence
from kvlinker.linking.explanation import Explanation, LinkCost, layer_masks, layer_ranges, linked_segments
from kvlinker.linking.forecast import Forecast
from kvlinker.linking.plan import LinkPlan, probe_plan
from kvlinker.linking.policy import Policy

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


def explanation_of(
    plan: LinkPlan,
    refinement: Refinement | None,
    evidence: Evidence,
    *,
    asked: Policy,
    forecast: Forecast | None = None,
    layers: int,
    cost: CostModel,
) -> Explanation:
    """Of a plan that was made by this evidence, and what became of it in a model of so many ``layers``. ``asked``: the
    request's policy, which may have settled for the plan's."""
    prompt, policy = plan.prompt, plan.policy
    dropped = () if refinement is None else refinement.dropped
    shown = () if refinement is None else refinement.shown
    recomputed = plan.recomputed_tokens if refinement is None else refinement.recomputed_tokens
    masks = layer_masks(plan, layers, dropped)
    probed = cost.flops(layer_masks(probe_plan(prompt, policy), layers, ())) if policy.probes else 0.0
    return Explanation(
        policy=asked.name,
        settled=policy.name,
        forecast=forecast,
        tokens=plan.length,
        segments=linked_segments(prompt),
        layers=layer_ranges(prompt, masks),
        scores=(*policy.explain(prompt, evidence), *shown),
        cost=LinkCost(
            cached_tokens=plan.cached_tokens + plan.recomputed_tokens - recomputed,
            recomputed_tokens=recomputed,
            fresh_tokens=plan.fresh_tokens,
            flops=cost.flops(masks) + probed,
            full_flops=cost.flops([np.ones(plan.length, dtype=np.bool_)] * layers),
        ),
    )
