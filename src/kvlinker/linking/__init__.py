"""Linking: which cached tokens to keep and which to recompute. Knows prompts, no model and no engine."""

from kvlinker.linking import builtin
from kvlinker.linking.plan import LinkPlan, Placement, make_plan
from kvlinker.linking.policy import CountPolicy, LayerEvidence, Policy
from kvlinker.linking.registry import parse_policy, policies, register

__all__ = [
    "CountPolicy",
    "LayerEvidence",
    "LinkPlan",
    "Placement",
    "Policy",
    "builtin",
    "make_plan",
    "parse_policy",
    "policies",
    "register",
]
