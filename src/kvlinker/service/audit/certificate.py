"""A certificate states the measured agreement of a policy with a model. ``kvlinker-lab certify``
writes certificates, and servers may require them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.linking import Policy
from kvlinker.settings import Settings
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FOLDER = "certificates"
"""The folder in the state directory that certificates are kept in."""

RAW = "raw"
"""The codec that changes nothing."""

FINGERPRINT_CHARACTERS = 16
"""How much of a fingerprint files are named by."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many answers agree with the full computation, with the exact 95% interval of their
    share."""

    samples: int
    agreeing: int
    agreement: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True, slots=True)
class Certificate:
    """The figures of one policy with one model."""

    model: str
    fingerprint: str
    """The engine's fingerprint of the model; a certificate holds for no other."""

    policy: str

    conditions: Mapping[str, Any]
    """``conditions_of`` the settings that it was measured under; it holds for no others."""

    target: float
    """The wanted share of agreeing answers."""

    passed: bool
    """True if all checks passed, and the agreement's interval lies above the target."""

    agreement: Agreement
    """All answers together."""

    issued_at: float
    """Unix seconds."""

    command: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]

    checks: tuple[Mapping[str, Any], ...]
    """The self-test's checks: ``name``, ``meaning``, ``error``, ``passed``."""

    quality: tuple[Mapping[str, Any], ...]
    """Scores by data set and task, as ``bench quality`` reports them, of the policy and of
    ``full``."""

    tasks: Mapping[str, Agreement]
    """The agreement by task; ``own chunks`` are prompts of the store's chunks."""

    def write(self, path: Path) -> None:
        """Write it as JSON, so that who reads meanwhile finds the old one or the new one, whole.
        Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = (
            json.dumps({"object": "certificate", **asdict(self)}, indent=2, default=str) + "\n"
        )
        replace_file(path, content.encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of ``write``. Raises InvalidRequestError for a file that is no
        certificate."""
        try:
            content = json.loads(path.read_text())
            content.pop("object")
            content["agreement"] = Agreement(**content["agreement"])
            content["tasks"] = {
                name: Agreement(**figures) for name, figures in content["tasks"].items()
            }
            return cls(
                **content
                | {
                    "checks": tuple(content["checks"]),
                    "quality": tuple(content["quality"]),
                }
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequestError(f"{path} is no certificate: {error}.") from error


def conditions_of(settings: Settings) -> dict[str, Any]:
    """Return what answers under a policy depend on beside the model: how chunks and prompts are
    made, what codecs take from chunks, and the version of kvlinker."""
    return {
        "kvlinker": version("kvlinker"),
        "generation_context": str(settings.generation_context),
        "system_prompt": settings.system_prompt,
        "chat_template": settings.chat_template,
        "codecs": list(lossy_codecs(settings)),
    }


def lossy_codecs(settings: Settings) -> tuple[str, ...]:
    """Return the names of the codecs of tiers that change chunks, sorted."""
    codecs = {
        settings.disk_codec if settings.disk_space else RAW,
        settings.redis_codec if settings.redis_url else RAW,
        settings.object_codec if settings.object_url and settings.object_space else RAW,
    }
    return tuple(sorted({name.partition("+")[0] for name in codecs} - {RAW}))


def certificate_path(state_dir: Path, fingerprint: str, policy: str) -> Path:
    """Return where the certificate of a policy with the model of this fingerprint is kept."""
    return state_dir / FOLDER / f"{fingerprint[:FINGERPRINT_CHARACTERS]}-{policy}.json"


class CertifiedPolicies:
    """The policies that may be used with a model: those with a certificate that passed under the
    same conditions, and those that compute everything."""

    def __init__(self, settings: Settings, fingerprint: str) -> None:
        """Read the certificates in the state directory once; files that are none, or for other
        conditions, are passed over with a warning."""
        self._model = settings.model
        self.names = frozenset(_passed(settings.state_dir, fingerprint, conditions_of(settings)))

    def refusal(self, policy: Policy) -> str | None:
        """Return why the policy may not be used, and the way out; None if it may."""
        if policy.exact or policy.name in self.names:
            return None
        known = ", ".join((*sorted(self.names), "full"))
        return (
            f"Policy {policy} has no certificate for this model and these settings, and this server"
            f" answers under certified policies only: {known}. Use one of them, or have the"
            f" operator run 'kvlinker-lab certify --model {self._model} --policy {policy}'."
        )

    def check(self, policy: Policy) -> None:
        """Raise PolicyError if the policy may not be used."""
        reason = self.refusal(policy)
        if reason is not None:
            raise PolicyError(reason, param="link.policy")


def _passed(state_dir: Path, fingerprint: str, conditions: Mapping[str, Any]) -> list[str]:
    """Return the names of the policies that have a certificate for this model and these conditions,
    and passed."""
    found = []
    for path in sorted((state_dir / FOLDER).glob(f"{fingerprint[:FINGERPRINT_CHARACTERS]}-*.json")):
        try:
            certificate = Certificate.read(path)
        except InvalidRequestError as error:
            logger.warning("%s", error.message)
            continue
        if certificate.fingerprint != fingerprint or not certificate.passed:
            continue
        others = [
            f"{name} {certificate.conditions.get(name)!r} instead of {value!r}"
            for name, value in conditions.items()
            if certificate.conditions.get(name) != value
        ]
        if others:
            logger.warning("%s was measured with %s, and does not count.", path, ", ".join(others))
        else:
            found.append(certificate.policy)
    return found
