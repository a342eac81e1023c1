"""Merges the findings of several servers' audits into one answer: those that share a catalog
already report the same, the others' samples are added up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvlinker.doors.http.fields.audit import (
    AuditObject,
    AuditRow,
    DecisionObject,
    KindAudit,
    PolicyAudit,
    PolicySetting,
    TenantAudit,
)
from kvlinker.service.audit.comparison import RequestKind
from kvlinker.service.audit.figures import Drift, Tally

Row = TypeVar("Row", bound=AuditRow)
Key = TypeVar("Key")


def merge_reports(reports: Sequence[AuditObject]) -> AuditObject:
    """Merge the reports of servers, at least one: each pool counts once, by the report with the
    most samples. Settings that differ are listed."""
    pools = _one_of_each_pool(reports)
    tenants: defaultdict[str, list[PolicyAudit]] = defaultdict(list)
    for each in pools:
        for tenant in each.tenants or ():
            tenants[tenant.tenant] += tenant.policies
    skipped: defaultdict[str, int] = defaultdict(int)
    for each in reports:
        for reason, count in each.skipped.items():
            skipped[reason] += count
    return AuditObject(
        model=", ".join(dict.fromkeys(each.model for each in reports)),
        pool=pools[0].pool if len(pools) == 1 else None,
        share=max(each.share for each in reports),
        pending=sum(each.pending for each in reports),
        skipped=dict(sorted(skipped.items())),
        policies=_policies(row for each in pools for row in each.policies),
        kinds=_kinds(row for each in pools for row in each.kinds),
        tenants=None
        if all(each.tenants is None for each in reports)
        else [
            TenantAudit(tenant=name, policies=_policies(rows))
            for name, rows in sorted(tenants.items())
        ],
        setting=_merge_settings([each.setting for each in pools]),
        decisions=_decisions(pools),
    )


def _one_of_each_pool(reports: Sequence[AuditObject]) -> list[AuditObject]:
    """Return one answer for each pool, and all of those without one."""
    best: dict[str | int, AuditObject] = {}
    for number, each in enumerate(reports):
        name = number if each.pool is None else each.pool
        if name not in best or _samples(each) > _samples(best[name]):
            best[name] = each
    return list(best.values())


def _samples(report: AuditObject) -> int:
    return sum(row.samples for row in report.policies)


def _policies(rows: Iterable[PolicyAudit]) -> list[PolicyAudit]:
    joined = []
    for policy, (tally, same) in _group(rows, lambda row: row.policy).items():
        last = max((row.drifted_at for row in same if row.drifted_at is not None), default=None)
        drift = Drift(sum(row.drifts for row in same), last)
        joined.append(PolicyAudit.of(policy, tally, drift))
    return joined


def _kinds(rows: Iterable[KindAudit]) -> list[KindAudit]:
    joined = _group(
        rows, lambda row: (row.policy, RequestKind(row.chunks, row.tokens, row.implicit))
    )
    return [KindAudit.of(policy, kind, tally) for (policy, kind), (tally, _) in joined.items()]


def _group(rows: Iterable[Row], key: Callable[[Row], Key]) -> dict[Key, tuple[Tally, list[Row]]]:
    """Return the rows by their keys, sorted, with the tally of each key's."""
    same: defaultdict[Key, list[Row]] = defaultdict(list)
    for row in rows:
        same[key(row)].append(row)
    joined = {}
    for name, group in sorted(same.items(), key=lambda entry: str(entry[0])):
        tally = Tally()
        for row in group:
            tally = tally.plus_all(row.tally)
        joined[name] = (tally, group)
    return joined


def _merge_settings(settings: Sequence[PolicySetting]) -> PolicySetting:
    first = settings[0]
    return PolicySetting(
        policy=", ".join(dict.fromkeys(each.policy for each in settings)),
        target=first.target,
        ladder=first.ladder,
    )


def _decisions(pools: Sequence[AuditObject]) -> list[DecisionObject]:
    decisions = (decision for each in pools for decision in each.decisions)
    return sorted(decisions, key=lambda decision: decision.time)
