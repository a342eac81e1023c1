"""Policies by name: the decorator that registers one, and the parser of strings such as
``query-5+legolink-16``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from kvlinker.base.errors import PolicyError, did_you_mean
from kvlinker.base.registry import Registry
from kvlinker.linking.policy import SIGN, Policy, joined

P = TypeVar("P", bound=type[Policy])

MOST_PARTS = 8

_registry: Registry[type[Policy]] = Registry(
    "policy", own="kvlinker.linking.policies", group="kvlinker.policies"
)


def register(policy: P) -> P:
    """Decorate a class: make ``policy`` available under its ``family``.

    Raises ValueError when another class has that name.
    """
    if SIGN in policy.family:
        raise ValueError(
            f"policy {policy.family!r} has a {SIGN!r} in its name, which joins policies"
        )
    _registry.add(policy.family, policy)
    parse_policy.cache_clear()  # a longer name may have been parsed as a shorter one's parameter
    return policy


def known_policies() -> Mapping[str, type[Policy]]:
    """Return all registered policies by family, installed plugins included, sorted by name."""
    return MappingProxyType(dict(sorted(_registry.known().items())))


@lru_cache(maxsize=256)
def parse_policy(text: str) -> Policy:
    """Make the policy that ``text`` names: a family with its parameters after hyphens, or several
    joined by ``+``.

    Raises PolicyError for an unknown family, for parameters that the family does not take, and for
    too many parts.
    """
    count = text.count(SIGN) + 1
    if count > MOST_PARTS:
        raise PolicyError(
            f"{count} policies are joined, but at most {MOST_PARTS} can be.", param="link.policy"
        )
    return joined(_parse_one(part) for part in text.split(SIGN))


def as_policy(policy: str | Policy) -> Policy:
    """Return the policy itself, or the one that the text names. Raises PolicyError as
    ``parse_policy`` does, and for what is neither."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str):
        raise PolicyError(
            f"'policy' is {policy!r}, but must be a policy, or a name such as 'legolink-4'.",
            param="link.policy",
        )
    return parse_policy(policy)


def _parse_one(text: str) -> Policy:
    known = known_policies()
    matches = [name for name in known if text == name or text.startswith(f"{name}-")]
    if not matches:
        raise PolicyError(
            f"Unknown policy {text!r}.{did_you_mean(text.partition('-')[0], known)} "
            f"Known policies: {', '.join(cls.usage() for cls in known.values())}.",
            param="link.policy",
        )
    family = max(matches, key=len)  # naive-unpositioned is not naive with a parameter
    return known[family].parse(text[len(family) + 1 :] if len(text) > len(family) else None)


def describe_policies(unsupported: Callable[[Policy], str | None]) -> tuple[dict[str, Any], ...]:
    """Describe all registered policies, sorted by name, as JSON.

    ``unsupported`` returns the reason why an engine cannot follow a policy, None if it can.
    ``supported`` is true if the engine can follow the policy with at least some of its parameters;
    ``restriction`` is the reason why it cannot with others.
    """
    described = []
    for policy in known_policies().values():
        reasons = [unsupported(example) for example in policy.examples()]
        restriction = next((reason for reason in reasons if reason is not None), None)
        described.append(
            policy.describe() | {"supported": None in reasons, "restriction": restriction}
        )
    return tuple(described)
