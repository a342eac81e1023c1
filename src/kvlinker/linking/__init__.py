"""Linking: which cached tokens to keep and which to recompute. Knows prompts, no model and no engine."""

from kvlinker.linking import builtin
from kvlinker.linking.evidence import Evidence, LayerEvidence
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.forecast import Forecast
from kvlinker.linking.library import Library, NoVariants, Variant
from kvlinker.linking.parameters import choice, number, percentage
from kvlinker.linking.plan import LinkPlan, Placement, make_plan, probe_plan
from kvlinker.linking.policy import Policy
from kvlinker.linking.registry import as_policy, parse_policy, policies, register
from kvlinker.linking.score import Score
from kvlinker.linking.selection import highest, share

__all__ = [
    "Evidence",
    "Explanation",
    "Forecast",
    "LayerEvidence",
    "Library",
    "LinkPlan",
    "NoVariants",
    "Placement",
    "Policy",
    "Score",
    "Variant",
    "as_policy",
    "builtin",
    "choice",
    "highest",
    "make_plan",
    "number",
    "parse_policy",
    "percentage",
    "policies",
    "probe_plan",
    "register",
    "share",
]
