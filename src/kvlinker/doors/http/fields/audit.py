"""The body of /v1/audit."""

from __future__ import annotations

from typing import Literal, Self

from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.service.audit.comparison import RequestKind
from kvlinker.service.audit.controller import Reason
from kvlinker.service.audit.figures import Drift, Tally


class AuditRow(ResponseBody):
    """The figures of a policy over ``samples`` compared answers.

    ``agreement`` is the share of answers whose first token the full computation finds the most
    likely, too, with its exact 95% interval (``ci_low`` to ``ci_high``); ``alike`` the share of
    those all of whose tokens it does. ``kl`` and ``answer_kl`` are the divergence of the first
    token's distribution, and the mean along the answer, in nats, over the ``measured`` answers that
    have distributions. ``diverged_after`` is the mean number of tokens before answers that are not
    alike diverge.
    """

    policy: str
    samples: int
    agreement: float
    ci_low: float
    ci_high: float
    alike: float
    alike_ci_low: float
    alike_ci_high: float
    measured: int
    kl: float | None
    answer_kl: float | None
    diverged_after: float | None

    @property
    def tally(self) -> Tally:
        """The counts and sums of the row."""
        unlike = self.samples - round(self.alike * self.samples)
        return Tally(
            samples=self.samples,
            agreeing=round(self.agreement * self.samples),
            alike=self.samples - unlike,
            kl_sum=(self.kl or 0.0) * self.measured,
            answer_kl_sum=(self.answer_kl or 0.0) * self.measured,
            measured=self.measured,
            diverged_after=round((self.diverged_after or 0.0) * unlike),
        )

    @classmethod
    def fields_of(cls, policy: str, tally: Tally) -> dict[str, object]:
        """Return the fields of a tally, which has an answer at least."""
        low, high = tally.agreement_interval
        alike_low, alike_high = tally.alike_interval
        return {
            "policy": policy,
            "samples": tally.samples,
            "agreement": tally.agreement,
            "ci_low": low,
            "ci_high": high,
            "alike": tally.alike_share,
            "alike_ci_low": alike_low,
            "alike_ci_high": alike_high,
            "measured": tally.measured,
            "kl": tally.kl,
            "answer_kl": tally.answer_kl,
            "diverged_after": tally.mean_divergence,
        }


class PolicyAudit(AuditRow):
    """The figures of a policy. ``drifts`` counts how often its agreement was seen to fall, over all
    tenants; ``drifted_at`` is when that was last, in Unix seconds."""

    drifts: int
    drifted_at: int | None

    @classmethod
    def of(cls, policy: str, tally: Tally, drift: Drift) -> Self:
        """Make the row of a policy."""
        last = None if drift.last is None else int(drift.last)
        return cls.model_validate(
            cls.fields_of(policy, tally) | {"drifts": drift.alarms, "drifted_at": last}
        )


class KindAudit(AuditRow):
    """The figures of a policy on one kind of requests: by the number of chunks, by the prompt's
    length in tokens, and by whether none of its chunks was named by an id."""

    chunks: str
    tokens: str
    implicit: bool

    @classmethod
    def of(cls, policy: str, kind: RequestKind, tally: Tally) -> Self:
        """Make the row of a policy and a kind."""
        return cls.model_validate(cls.fields_of(policy, tally) | kind._asdict())


class TenantAudit(ResponseBody):
    """The figures of one tenant by policy."""

    tenant: str
    policies: list[PolicyAudit]


class PolicySetting(ResponseBody):
    """The default policy in force for the caller; ``target`` is the agreement that it is to keep,
    and ``ladder`` the policies that it may become, the cheapest first (null: it stays as it is)."""

    policy: str
    target: float | None
    ladder: list[str] | None


class DecisionObject(ResponseBody):
    """A change of the default policy, of ``tenant`` or of all (``*``), and the evidence for it.

    ``agreeing`` of ``samples`` answers under the policy ``before`` agreed; a share on that side of
    the target explains this ``evidence`` times better than the target does. ``time`` is in Unix
    seconds.
    """

    time: int
    tenant: str
    before: str
    after: str
    reason: Reason
    samples: int
    agreeing: int
    evidence: float


class AuditObject(ResponseBody):
    """The audit's findings since it began, of all servers with the same ``pool``, which share a
    catalog; null if nothing is pooled. ``share`` of the requests with chunks are drawn; ``pending``
    answers wait here to be compared, ``skipped`` counts those that are not, by reason. A key sees
    its own requests; an admin's sees all, and ``tenants``."""

    object: Literal["audit"] = "audit"
    model: str
    pool: str | None
    share: float
    pending: int
    skipped: dict[str, int]
    policies: list[PolicyAudit]
    kinds: list[KindAudit]
    tenants: list[TenantAudit] | None
    setting: PolicySetting
    decisions: list[DecisionObject]
