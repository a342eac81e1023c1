"""Keeps the audit's figures by policy, tenant and kind of request, and the drift of each policy."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from kvlinker.service.audit.comparison import Comparison, RequestKind
from kvlinker.service.audit.statistics import DriftDetector, Interval, clopper_pearson


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts and sums over compared answers."""

    samples: int = 0
    agreeing: int = 0
    """The answers whose first token is the full computation's, too."""

    alike: int = 0
    """The answers all of whose tokens are."""

    kl_sum: float = 0.0
    answer_kl_sum: float = 0.0
    measured: int = 0
    """The answers with distributions, over which the sums go."""

    diverged_after: int = 0
    """The sum of the tokens before the divergence, over answers that are not alike."""

    def plus(self, found: Comparison) -> Tally:
        """Return the tally with one more answer."""
        return self.plus_all(
            Tally(
                samples=1,
                agreeing=int(found.agrees),
                alike=int(found.alike),
                kl_sum=found.kl or 0.0,
                answer_kl_sum=found.answer_kl or 0.0,
                measured=int(found.kl is not None),
                diverged_after=found.divergence or 0,
            )
        )

    def plus_all(self, other: Tally) -> Tally:
        """Return the tally of both."""
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in _TALLIED})

    @property
    def agreement(self) -> float:
        """The share of agreeing answers; 0 without any."""
        return self.agreeing / max(self.samples, 1)

    @property
    def agreement_interval(self) -> Interval:
        """The exact 95% interval of the agreement."""
        return clopper_pearson(self.agreeing, self.samples)

    @property
    def alike_share(self) -> float:
        """The share of answers that are alike; 0 without any."""
        return self.alike / max(self.samples, 1)

    @property
    def alike_interval(self) -> Interval:
        """The exact 95% interval of that share."""
        return clopper_pearson(self.alike, self.samples)

    @property
    def kl(self) -> float | None:
        """The mean divergence of first tokens, in nats; None if none was measured."""
        return self.kl_sum / self.measured if self.measured else None

    @property
    def answer_kl(self) -> float | None:
        """The mean divergence along answers, in nats; None if none was measured."""
        return self.answer_kl_sum / self.measured if self.measured else None

    @property
    def mean_divergence(self) -> float | None:
        """The mean number of tokens before answers that are not alike diverge; None if all are
        alike."""
        unlike = self.samples - self.alike
        return self.diverged_after / unlike if unlike else None


_TALLIED = tuple(field.name for field in fields(Tally))


@dataclass(frozen=True, slots=True)
class Drift:
    """The times that a policy's agreement has fallen since the audit began, and when that was
    noticed last, in Unix seconds (None: never)."""

    alarms: int = 0
    last: float | None = None


_Group = tuple[str, str, RequestKind]
"""Policy, tenant and kind of an answer."""

MOST_POLICIES = 64
"""The policies that have figures of their own: callers can make up others without end."""

OTHER_POLICIES = "other"
"""The name under which the answers under all further policies are counted."""

MOST_GROUPS = 10_000
"""The most tallies of a ``FiguresState``: those with the most answers."""


@dataclass(frozen=True, slots=True)
class FiguresState:
    """The state of ``AuditFigures``."""

    tallies: tuple[tuple[_Group, Tally], ...]
    detectors: dict[str, DriftDetector]
    """By policy."""

    drifts: dict[str, Drift]


K = TypeVar("K", bound=Any)


class AuditFigures:
    """Holds the figures since the audit began. All methods may be called from any thread."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        """The ``known`` policies have figures of their own whatever others come."""
        self._known = frozenset(known)
        self._lock = threading.Lock()  # guards everything below
        self._tallies: defaultdict[_Group, Tally] = defaultdict(Tally)
        self._detectors: defaultdict[str, DriftDetector] = defaultdict(DriftDetector)
        self._drifts: dict[str, Drift] = {}

    def add(
        self, policy: str, tenant: str, kind: RequestKind, found: Comparison, now: float
    ) -> bool:
        """Add an answer that was compared at ``now``, in Unix seconds; return whether the agreement
        under its policy is seen to have fallen with it."""
        with self._lock:
            policy = self._name(policy)
            group = (policy, tenant, kind)
            self._tallies[group] = self._tallies[group].plus(found)
            detector = self._detectors[policy]
            drifted = detector.note(found.agrees)
            if drifted:
                self._drifts[policy] = Drift(detector.alarms, now)
            return drifted

    def name(self, policy: str) -> str:
        """Return the name under which a policy is counted."""
        with self._lock:
            return self._name(policy)

    def state(self) -> FiguresState:
        """Return the current state, of ``MOST_GROUPS`` at most."""
        with self._lock:
            tallies = sorted(self._tallies.items(), key=lambda entry: -entry[1].samples)[
                :MOST_GROUPS
            ]
            policies = {group[0] for group, _ in tallies}
            detectors = {
                name: replace(each) for name, each in self._detectors.items() if name in policies
            }
            drifts = {name: each for name, each in self._drifts.items() if name in policies}
            return FiguresState(tuple(tallies), detectors, drifts)

    def restore(self, state: FiguresState) -> None:
        """Replace the current state by another."""
        with self._lock:
            self._tallies = defaultdict(Tally, state.tallies)
            self._detectors = defaultdict(DriftDetector, state.detectors)
            self._drifts = dict(state.drifts)

    def drift(self, policy: str) -> Drift:
        """Return the drift of a policy, over all tenants."""
        with self._lock:
            return self._drifts.get(policy, Drift())

    def by_policy(self, tenant: str | None = None) -> dict[str, Tally]:
        """Return the figures by policy, sorted by name: a tenant's, or all."""
        return self._sums(lambda group: group[0], tenant)

    def by_kind(self, tenant: str | None = None) -> dict[tuple[str, RequestKind], Tally]:
        """Return the figures by policy and kind, sorted: a tenant's, or all."""
        return self._sums(lambda group: (group[0], group[2]), tenant)

    def tenants(self) -> list[str]:
        """Return the tenants of compared answers, sorted."""
        with self._lock:
            return sorted({tenant for _, tenant, _ in self._tallies})

    def _name(self, policy: str) -> str:
        """Return the name under which a policy is counted; the lock is held."""
        named = (
            policy in self._known
            or policy in self._detectors
            or len(self._detectors) < MOST_POLICIES
        )
        return policy if named else OTHER_POLICIES

    def _sums(self, key: Callable[[_Group], K], tenant: str | None) -> dict[K, Tally]:
        with self._lock:
            entries = [
                (group, tally)
                for group, tally in self._tallies.items()
                if tenant in (None, group[1])
            ]
        return _summed((key(group), tally) for group, tally in entries)


def _summed(entries: Iterable[tuple[K, Tally]]) -> dict[K, Tally]:
    sums: defaultdict[K, Tally] = defaultdict(Tally)
    for key, tally in entries:
        sums[key] = sums[key].plus_all(tally)
    return dict(sorted(sums.items()))
