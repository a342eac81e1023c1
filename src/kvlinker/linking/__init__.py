"""Linking decides which cached tokens to keep and which to recompute. It knows prompts, but no
model and no engine."""

from kvlinker.linking.evidence import (
    EmptyLibrary,
    Evidence,
    Forecast,
    LayerEvidence,
    Library,
    Variant,
)
from kvlinker.linking.explanation import Explanation
from kvlinker.linking.link import Link, make_plan, probe_plan
from kvlinker.linking.parameters import choice, number, percentage
from kvlinker.linking.plan import LinkPlan, Placement
from kvlinker.linking.policy import Needs, Policy
from kvlinker.linking.registry import (
    as_policy,
    describe_policies,
    known_policies,
    parse_policy,
    register,
)
from kvlinker.linking.selection import Score, highest, share

__all__ = [
    "EmptyLibrary",
    "Evidence",
    "Explanation",
    "Forecast",
    "LayerEvidence",
    "Library",
    "Link",
    "LinkPlan",
    "Needs",
    "Placement",
    "Policy",
    "Score",
    "Variant",
    "as_policy",
    "choice",
    "describe_policies",
    "highest",
    "known_policies",
    "make_plan",
    "number",
    "parse_policy",
    "percentage",
    "probe_plan",
    "register",
    "share",
]
