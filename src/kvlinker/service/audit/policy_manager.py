"""Watches over an LLM's answers as its settings say: the audit, the quality target, and
certificates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvlinker.base.events import Events
from kvlinker.engines.contract.contract import Engine
from kvlinker.linking import Policy, parse_policy
from kvlinker.service.audit.auditor import AuditOptions, Auditor
from kvlinker.service.audit.certificate import CertifiedPolicies
from kvlinker.service.audit.controller import QualityController, make_ladder
from kvlinker.service.audit.figures import AuditFigures
from kvlinker.service.audit.findings import Findings
from kvlinker.service.audit.journal import AuditJournal
from kvlinker.service.audit.measured import AutoPolicy
from kvlinker.service.audit.pool import AuditPool
from kvlinker.settings import AUTO, Settings
from kvlinker.store.catalog.audit import AuditLog

logger = logging.getLogger(__name__)


class PolicyManager:
    """Decides which policy applies where a request names none, which ones may be used, and which
    answers are audited.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        events: Events,
        *,
        model: str,
        decode: Callable[[Sequence[int]], str],
    ) -> None:
        """``model`` is the served name, ``decode`` turns token ids into text. Raises PolicyError if
        the default policy lacks its certificate, and InvalidRequestError for a ladder or a file
        that cannot be used."""
        self.controller: QualityController | None = None
        """Steers the default policy; None if no quality target is set."""

        self.auditor: Auditor | None = None
        """Compares answers; None if no share of them is to be audited."""

        self.auto: AutoPolicy | None = None
        """Chooses the default policy; None if one is set."""

        self._engine = engine
        self._certified: CertifiedPolicies | None = None
        if settings.require_certificate:
            self._certified = CertifiedPolicies(settings, engine.fingerprint)
        self._configured = parse_policy(settings.usual_policy)
        if settings.policy == AUTO:
            self.auto = AutoPolicy(settings, engine.fingerprint, self._refusal)
            if self.auto.candidates or self._certified is None:
                self._configured = self.auto.policy
        name = settings.implicit_policy
        self._implicit = None if name is None else parse_policy(name)
        for policy in (self._configured, self._implicit or self._configured):
            self.check(policy)
        if settings.quality_target is not None:
            ladder = make_ladder(
                self._configured, settings.quality_policies, unsupported=self._refusal
            )
            self.controller = QualityController(
                ladder, settings.quality_target, per_tenant=settings.quality_per_tenant
            )
        if settings.audit:
            journal = None
            if settings.audit_log is not None:
                texts = decode if settings.audit_log_text else None
                journal = AuditJournal(settings.audit_log.expanduser(), model=model, decode=texts)
            steps = () if self.controller is None else self.controller.ladder.names
            candidates = () if self.auto is None else self.auto.candidates
            usual = (self._configured, self._implicit, *candidates)
            defaults = (each.name for each in usual if each)
            self._findings = Findings(events, AuditFigures((*defaults, *steps)), self.controller)
            self.auditor = Auditor(
                engine,
                events,
                AuditOptions(settings.audit, settings.audit_tokens),
                self._findings,
                journal=journal,
            )

    def default_policy(self, tenant: str, *, implicit: bool = False) -> Policy:
        """Return the policy of the tenant's requests that name none: the one that is set, that was
        chosen for the model, or that keeps the quality target. ``implicit``: none of its chunks was
        named by id."""
        if implicit and self._implicit is not None:
            return self._implicit
        if self.controller is not None:
            return self.controller.policy(tenant)
        return self._configured if self.auto is None else self.auto.policy

    @property
    def needs_no_chunks(self) -> bool:
        """True if prompts without ids are computed in full where they name no policy.

        A default policy that a quality target has raised until it computes everything is no reason:
        it is lowered again by answers with chunks.
        """
        if self._implicit is not None:
            return self._implicit.exact
        return self.controller is None and self.auto is None and self._configured.exact

    def check(self, policy: Policy) -> None:
        """Raise PolicyError for a policy that lacks its certificate, where certificates are
        required."""
        if self._certified is not None:
            self._certified.check(policy)

    def resume(self, log: AuditLog) -> None:
        """Go on with what audits of this model found that are in ``log``, and where the default
        policy is; from now on, this server's go there, and others' come from there. Servers call
        this before any request; does nothing without an audit, and when it is called again."""
        if self.auditor is not None and self.auditor.pool is None:
            self.auditor.pool = AuditPool(log, self._engine.fingerprint, self._findings)

    def close(self) -> None:
        """Stop comparing, and write the state; close the engine before. Idempotent."""
        if self.auditor is not None:
            self.auditor.close()
            if self.auditor.pool is not None:
                self.auditor.pool.close()

    def _refusal(self, policy: Policy) -> str | None:
        """Return why answers cannot be given under the policy; None if they can."""
        reason = self._engine.unsupported(policy)
        return (
            self._certified.refusal(policy)
            if reason is None and self._certified is not None
            else reason
        )
