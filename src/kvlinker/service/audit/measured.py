"""Measurements of linking policies with one model, by which ``policy = "auto"`` chooses among
them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvlinker.linking import Policy, parse_policy
from kvlinker.service.audit.certificate import FINGERPRINT_CHARACTERS, conditions_of
from kvlinker.service.audit.controller import FULL, USUAL, usual_policy
from kvlinker.settings import UNMEASURED, Settings
from kvlinker.store.format.durability import replace_file

logger = logging.getLogger(__name__)

FOLDER = "policies"
"""The folder in the state directory that holds a file for each model that was measured."""

TARGETS = {"high": 0.05, "balanced": 0.1, "fast": 0.2}
"""The most that answers may differ, by ``quality``: the mean KL along the full computation's
answer, in nats per token."""

ROWS = ("row", UNMEASURED, "row+query-15-sensitive")
"""The policies to choose from, cheapest first, where the engine has chunks at places in a row."""

ALONE = (*USUAL, "query-15-sensitive")
"""The policies to choose from elsewhere, as far as they are there."""


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """Measurements of a policy."""

    policy: str
    answer_kl: float
    """The mean KL along the full computation's answers, in nats per token."""
    agreement: float
    """The share of these answers' tokens that both find the most likely."""
    recomputed: float
    """The share of chunks' tokens that were computed again."""
    prompts: int
    tokens: int
    """The tokens of all answers."""


class AutoPolicy:
    """Chooses the cheapest policy that keeps the wanted quality with a model; until it is known
    which one does, one that keeps it with many models."""

    def __init__(
        self, settings: Settings, fingerprint: str, refusal: Callable[[Policy], str | None]
    ) -> None:
        """Read what was measured before with the model of this ``fingerprint``, under the same
        conditions; a file that is of others, or none, counts as none. ``refusal`` says why answers
        cannot be given under a policy."""
        for names in (ROWS, ALONE):
            candidates = [parse_policy(name) for name in names]
            self.candidates = tuple(each for each in candidates if refusal(each) is None)
            """The policies to measure, the cheapest first."""
            if self.candidates:
                break
        self.target = TARGETS[settings.quality]
        unmeasured = parse_policy(UNMEASURED)
        self._unmeasured = unmeasured if unmeasured in self.candidates else usual_policy(refusal)
        self._path, self._said = _path(settings, fingerprint), _said(settings, fingerprint)
        figures = figures_kept(settings, fingerprint)
        measured = [each.policy for each in figures] == [each.name for each in self.candidates]
        self.figures = figures if measured else ()
        """The measurements of the candidates, in their order; empty if nothing was measured."""
        self.policy = self._chosen()
        """The policy of requests that name none."""

    def keep(self, figures: Sequence[PolicyFigures]) -> None:
        """Choose by these figures of the candidates from now on, also after a restart."""
        self.figures = tuple(figures)
        self.policy = self._chosen()
        logger.info(
            "Requests that name no policy get %s: %s; wanted are at most %g. Set quality or policy"
            " to change that.",
            self.policy,
            ", ".join(f"{each.policy} has a KL of {each.answer_kl:.3f}" for each in figures),
            self.target,
        )
        content = self._said | {"figures": [asdict(each) for each in self.figures]}
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(content, indent=1).encode())
        except OSError as error:
            logger.warning("The policies are measured again next time: %s", error)

    def _chosen(self) -> Policy:
        return cheapest(self.figures, self.target) if self.figures else self._unmeasured


def cheapest(figures: Sequence[PolicyFigures], target: float) -> Policy:
    """Return the first policy whose answers differ by the ``target`` at most; full if none's do."""
    kept = (each.policy for each in figures if each.answer_kl <= target)
    return parse_policy(next(kept, FULL))


def figures_kept(settings: Settings, fingerprint: str) -> tuple[PolicyFigures, ...]:
    """Return what was measured with the model of this ``fingerprint`` under the conditions that the
    settings make, the cheapest policy first; empty if nothing was, or it cannot be read."""
    try:
        content = json.loads(_path(settings, fingerprint).read_bytes())
        if any(content[name] != value for name, value in _said(settings, fingerprint).items()):
            return ()
        return tuple(PolicyFigures(**each) for each in content["figures"])
    except (OSError, ValueError, KeyError, TypeError):
        return ()


def _path(settings: Settings, fingerprint: str) -> Path:
    return settings.state_dir / FOLDER / f"{fingerprint[:FINGERPRINT_CHARACTERS]}.json"


def _said(settings: Settings, fingerprint: str) -> dict[str, Any]:
    return {"fingerprint": fingerprint, "conditions": conditions_of(settings)}
