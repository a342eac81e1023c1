"""How a prompt was linked, told by either engine."""

from __future__ import annotations

import numpy as np

from kvlinker.engine.cost import CostModel
from kvlinker.linking.evidence import Evidence, Forecast
from kvlinker.linking.explanation import Explanation, LinkCost, layer_ranges, linked_segments
from kvlinker.linking.plan import LinkPlan, layer_masks, probe_plan
from kvlinker.linking.policy import Policy
from kvlinker.linking.refinement import Refinement


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
