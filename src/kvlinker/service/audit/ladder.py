"""The settings of the default policy that a quality target may choose among, from the cheapest to
the full one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import Policy, parse_policy
from kvlinker.linking.parameters import Number, declared
from kvlinker.linking.policy import joined

USUAL = ("query-5-sensitive", "legolink-16")
"""The policies, the better one first, whose numbers are raised where the default policy has
none."""

FULL = "full"


@dataclass(frozen=True, slots=True)
class Ladder:
    """Policies from the cheapest to the one that computes everything."""

    policies: tuple[Policy, ...]

    start: int
    """The index of the policy to begin with."""

    @property
    def names(self) -> tuple[str, ...]:
        """The policies' names."""
        return tuple(policy.name for policy in self.policies)


def make_ladder(
    policy: Policy,
    given: Sequence[str] = (),
    *,
    unsupported: Callable[[Policy], str | None] = lambda policy: None,
) -> Ladder:
    """Make the ladder that begins with ``policy``: of the policies ``given``, or of the numbers
    that are worth trying for it. Behind one without a number stand those of the best usual policy
    that the engine supports.

    ``unsupported`` says why the engine cannot follow a policy. Raises PolicyError if it is
    ``policy`` or one that is given, and InvalidRequestError if ``policy`` is none of those given.
    """
    if (reason := unsupported(policy)) is not None:
        raise PolicyError(reason, param="policy")
    full = parse_policy(FULL)
    if given:
        wanted = [parse_policy(name) for name in given]
        for each in wanted:
            if (reason := unsupported(each)) is not None:
                raise PolicyError(reason, param="quality_policies")
        if policy not in (*wanted, full):
            raise InvalidRequestError(
                f"quality_policies are {', '.join(given)}, but the default policy, {policy}, is"
                " none of them. Add it, or set policy to one of them.",
                param="quality_policies",
            )
    else:
        usual = usual_policy(unsupported)
        wanted = _numbers(policy) or [policy, *_numbers(usual)]
        wanted = [each for each in wanted if unsupported(each) is None]
    steps = (*(each for each in dict.fromkeys(wanted) if not each.exact), full)
    return Ladder(steps, steps.index(policy if policy in steps else full))


def usual_policy(unsupported: Callable[[Policy], str | None]) -> Policy:
    """Return the best usual policy that is supported, else the full one."""
    policies = (parse_policy(name) for name in (*USUAL, FULL))
    return next(each for each in policies if unsupported(each) is None)


def _numbers(policy: Policy) -> list[Policy]:
    """Return the policy with the numbers that are worth trying, its own included, ascending; of a
    union, those of its first part with a number. None where it has no number."""
    for index, part in enumerate(policy.parts):
        for name, parameter in declared(type(part)).items():
            if isinstance(parameter, Number):
                before, after = policy.parts[:index], policy.parts[index + 1 :]
                values = sorted({*parameter.trials, getattr(part, name)})
                parts = [replace(part, **{name: value}) for value in values]  # type: ignore[type-var]
                return [joined((*before, each, *after)) for each in parts]
    return []
