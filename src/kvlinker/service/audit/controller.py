"""Keeps the agreement of answers at a target: raises or lowers the default policy by the audit's
findings, on a ladder of policies from the cheapest to the full one."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import Policy, parse_policy
from kvlinker.linking.parameters import Number, declared
from kvlinker.linking.policy import joined
from kvlinker.service.audit.statistics import RateTest, RepeatedTest, RepeatedTestState

logger = logging.getLogger(__name__)

CONFIDENCE = 0.95
"""The confidence with which agreement must be known to be below the target, or above it, before
anything changes."""

RETRY_ANSWERS = 500
"""The answers for which a policy that was below the target is not tried again; twice as many after
each further time."""

MOST_DECISIONS = 100
"""The last decisions that are kept."""

MOST_TENANTS = 10_000
"""The most tenants of a ``ControllerState``: those of the most answers."""

MOST_EVIDENCE = 1e12
"""The largest evidence that is reported."""

EVERYBODY = "*"
"""Stands for all tenants, where they are not steered apart."""


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
    names: Sequence[str] = (),
    *,
    unsupported: Callable[[Policy], str | None] = lambda policy: None,
) -> Ladder:
    """Make the ladder that begins with ``policy``: of the policies of these ``names``, or of the
    numbers that are worth trying for it. Behind one without a number stand those of the best usual
    policy that the engine supports.

    ``unsupported`` says why the engine cannot follow a policy. Raises PolicyError if it is
    ``policy`` or one of ``names``, and InvalidRequestError if ``policy`` is none of them.
    """
    if (reason := unsupported(policy)) is not None:
        raise PolicyError(reason, param="policy")
    full = parse_policy(FULL)
    if names:
        wanted = [parse_policy(name) for name in names]
        for each in wanted:
            if (reason := unsupported(each)) is not None:
                raise PolicyError(reason, param="quality_policies")
        if policy not in (*wanted, full):
            raise InvalidRequestError(
                f"quality_policies are {', '.join(names)}, but the default policy, {policy}, is"
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


class Reason(StrEnum):
    """The reason of a decision."""

    BELOW = "below target"
    ABOVE = "above target"


@dataclass(frozen=True, slots=True)
class Decision:
    """A change of the default policy, and the evidence for it."""

    time: float
    """Unix seconds."""

    tenant: str
    """The tenant whose default changes; ``*`` for all."""

    before: str
    after: str
    reason: Reason

    samples: int
    """The compared answers under the policy ``before`` that are the evidence: those since the
    deciding test began."""

    agreeing: int
    """The comparisons that agree."""

    evidence: float
    """The factor by which a rate on that side of the target explains them better than the target
    does; at least 2 / (1 - confidence)."""


@dataclass(frozen=True, slots=True)
class SteeringState:
    """The place of one tenant, or of all, on the ladder, and the findings about the step. Answers
    are compared ones."""

    step: int
    noted: int
    """The answers so far."""

    failures: dict[int, int]
    """How often each step was below the target."""

    closed_until: dict[int, int]
    """The number of answers before which a step that failed is not tried again."""

    below: RepeatedTestState
    above: RepeatedTestState


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The state of a ``QualityController``, with its ladder and target."""

    ladder: tuple[str, ...]
    start: int
    target: float
    per_tenant: bool
    steered: dict[str, SteeringState]
    """By tenant."""

    decisions: tuple[Decision, ...]


class QualityController:
    """Chooses the default policy on a ladder, for each tenant or for all together.

    Agreement that is known to be below the target raises it by one step, and the step that failed
    is left alone for a while, twice as long every time: so it settles instead of swinging.
    Agreement that is known to be above the target lowers it by one step. Both are known by
    sequential tests, which are as confident whenever one looks, and restart when they find that
    nothing is to be done: a fall after a good time is noticed as soon as one at its beginning,
    nearly. The last step computes everything. All methods may be called from any thread.
    """

    def __init__(self, ladder: Ladder, target: float, *, per_tenant: bool = False) -> None:
        """``target`` is the wanted share of agreeing answers, between 0 and 1. ``per_tenant``
        steers tenants apart."""
        self.ladder = ladder
        self.target = target
        self.per_tenant = per_tenant
        self._lock = threading.Lock()  # guards everything below
        self._steered: dict[str, _Steered] = {}
        self._decisions: deque[Decision] = deque(maxlen=MOST_DECISIONS)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The last decisions, the latest last."""
        with self._lock:
            return tuple(self._decisions)

    def state(self) -> ControllerState:
        """Return the current state, of ``MOST_TENANTS`` at most."""
        with self._lock:
            steered = {tenant: each.state for tenant, each in self._steered.items()}
            kept = sorted(steered, key=lambda tenant: -steered[tenant].noted)[:MOST_TENANTS]
            return ControllerState(
                self.ladder.names,
                self.ladder.start,
                self.target,
                self.per_tenant,
                {tenant: steered[tenant] for tenant in kept},
                tuple(self._decisions),
            )

    def restore(self, state: ControllerState) -> bool:
        """Replace the current state by another; returns False, and does nothing, where it is of
        another ladder, start or target, or steers other tenants together."""
        asked = (self.ladder.names, self.ladder.start, self.target, self.per_tenant)
        if (state.ladder, state.start, state.target, state.per_tenant) != asked:
            return False
        with self._lock:
            self._steered = {}
            for tenant, known in state.steered.items():
                self._steered[tenant] = _Steered(self.ladder, self.target)
                self._steered[tenant].restore(known)
            self._decisions = deque(state.decisions, maxlen=MOST_DECISIONS)
        return True

    def policy(self, tenant: str) -> Policy:
        """Return the default policy of a tenant now."""
        with self._lock:
            steered = self._steered.get(self._scope(tenant))
            return self.ladder.policies[self.ladder.start if steered is None else steered.step]

    def note(self, tenant: str, policy: str, agrees: bool, now: float) -> None:
        """Take an answer into account that was compared at ``now``, in Unix seconds, under the
        policy of this name."""
        scope = self._scope(tenant)
        with self._lock:
            if (steered := self._steered.get(scope)) is None:
                steered = self._steered[scope] = _Steered(self.ladder, self.target)
            decision = steered.note(scope, policy, agrees, now)
            if decision is not None:
                self._decisions.append(decision)
        if decision is not None:
            _log(decision, self.target)

    def _scope(self, tenant: str) -> str:
        return tenant if self.per_tenant else EVERYBODY


class _Steered:
    """The place on the ladder of one tenant, or of all, and the findings about it."""

    def __init__(self, ladder: Ladder, target: float) -> None:
        self.step = ladder.start
        self._names = ladder.names
        self._target = target
        self._noted = 0
        self._failures: dict[int, int] = {}
        self._closed_until: dict[int, int] = {}
        self._stay()

    def _stay(self) -> None:
        """Begin to gather evidence for the present step."""
        self._below = RepeatedTest(lambda: RateTest.falls_below(self._target), 1 - CONFIDENCE)
        self._above = RepeatedTest(lambda: RateTest.exceeds(self._target), 1 - CONFIDENCE)

    @property
    def state(self) -> SteeringState:
        """The current state."""
        return SteeringState(
            self.step,
            self._noted,
            dict(self._failures),
            dict(self._closed_until),
            self._below.state,
            self._above.state,
        )

    def restore(self, state: SteeringState) -> None:
        """Go on from a state for the same ladder and target."""
        self.step = state.step
        self._noted = state.noted
        self._failures = dict(state.failures)
        self._closed_until = dict(state.closed_until)
        self._below.restore(state.below)
        self._above.restore(state.above)

    def note(self, tenant: str, policy: str, agrees: bool, now: float) -> Decision | None:
        """Take an answer into account; return the decision that it leads to, if it leads to one."""
        self._noted += 1
        if policy != self._names[self.step]:
            return None
        self._below.note(agrees)
        self._above.note(agrees)
        if self._below.refuted and self.step + 1 < len(self._names):
            self._close()
            return self._go(tenant, self.step + 1, Reason.BELOW, self._below, now)
        lower = self.step - 1
        if self._above.refuted and lower >= 0 and self._closed_until.get(lower, 0) <= self._noted:
            return self._go(tenant, lower, Reason.ABOVE, self._above, now)
        return None

    def _close(self) -> None:
        """Leave the present step alone for a while, which failed."""
        failures = self._failures[self.step] = self._failures.get(self.step, 0) + 1
        self._closed_until[self.step] = self._noted + RETRY_ANSWERS * 2 ** (failures - 1)

    def _go(
        self, tenant: str, step: int, reason: Reason, test: RepeatedTest, now: float
    ) -> Decision:
        before, after = self._names[self.step], self._names[step]
        evidence = min(test.evidence, MOST_EVIDENCE)
        decision = Decision(
            now, tenant, before, after, reason, test.samples, test.successes, evidence
        )
        self.step = step
        self._stay()
        return decision


def _log(decision: Decision, target: float) -> None:
    """Log a decision with its evidence; one that no policy but the full computation kept the
    target, as a warning."""
    level = logging.WARNING if decision.after == FULL else logging.INFO
    logger.log(
        level,
        "Default policy of %s: %s instead of %s. %d of %d answers agreed with the full computation,"
        " which is %s %g (evidence %.3g to 1).",
        "all tenants" if decision.tenant == EVERYBODY else decision.tenant,
        decision.after,
        decision.before,
        decision.agreeing,
        decision.samples,
        "below" if decision.reason is Reason.BELOW else "above",
        target,
        decision.evidence,
    )
