"""GET /v1/audit: how live answers compare with the full computation."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter

from kvlinker.doors.http.edge.guards import CallerParam
from kvlinker.doors.http.fields.audit import (
    AuditObject,
    DecisionObject,
    KindAudit,
    PolicyAudit,
    PolicySetting,
    TenantAudit,
)
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.llm import LLM
from kvlinker.service.audit.controller import EVERYBODY
from kvlinker.service.audit.figures import AuditFigures

router = APIRouter(prefix="/v1", tags=["audit"])


@router.get("/audit")
async def read_audit(served: ServedModelParam, caller: CallerParam) -> AuditObject:
    """Report how live answers compare with full computation, by policy and by kind of request; and
    the default policy."""
    auditor, tenant = served.llm.policy_manager.auditor, None if caller.admin else caller.tenant
    figures = AuditFigures() if auditor is None else auditor.figures
    skipped = {} if auditor is None else auditor.skipped
    return AuditObject(
        model=served.llm.model_name,
        pool=None if auditor is None or auditor.pool is None else auditor.pool.name,
        share=served.settings.audit,
        pending=0 if auditor is None else auditor.pending,
        skipped={str(reason): count for reason, count in skipped.items()},
        policies=_policies(figures, tenant),
        kinds=[
            KindAudit.of(policy, kind, tally)
            for (policy, kind), tally in figures.by_kind(tenant).items()
        ],
        tenants=_tenants(figures) if caller.admin else None,
        setting=_setting(served.llm, caller.tenant),
        decisions=_decisions(served.llm, tenant),
    )


def _policies(figures: AuditFigures, tenant: str | None) -> list[PolicyAudit]:
    """Return the figures by policy, a tenant's or all."""
    return [
        PolicyAudit.of(policy, tally, figures.drift(policy))
        for policy, tally in figures.by_policy(tenant).items()
    ]


def _tenants(figures: AuditFigures) -> list[TenantAudit]:
    return [
        TenantAudit(tenant=name, policies=_policies(figures, name)) for name in figures.tenants()
    ]


def _setting(llm: LLM, tenant: str) -> PolicySetting:
    controller = llm.policy_manager.controller
    return PolicySetting(
        policy=llm.default_policy(tenant).name,
        target=None if controller is None else controller.target,
        ladder=None if controller is None else list(controller.ladder.names),
    )


def _decisions(llm: LLM, tenant: str | None) -> list[DecisionObject]:
    """Return the last decisions, those that concern a tenant or all."""
    decisions = (
        () if llm.policy_manager.controller is None else llm.policy_manager.controller.decisions
    )
    seen = (each for each in decisions if tenant in (None, each.tenant) or each.tenant == EVERYBODY)
    return [DecisionObject(**asdict(each) | {"time": int(each.time)}) for each in seen]
