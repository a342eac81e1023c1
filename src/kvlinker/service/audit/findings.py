"""The audit's findings, and their effects: figures, and the default policy."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvlinker.base.events import AgreementFell, Events
from kvlinker.service.audit.comparison import Comparison, RequestKind
from kvlinker.service.audit.controller import ControllerState, QualityController
from kvlinker.service.audit.figures import AuditFigures, FiguresState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer that was drawn."""

    time: float
    """When it was compared, in Unix seconds."""

    tenant: str
    policy: str
    kind: RequestKind

    found: Comparison | None
    """None for an answer that was computed in full: it agrees, and is in no figures."""


@dataclass(frozen=True, slots=True)
class FindingsState:
    """All that is known."""

    figures: FiguresState
    controller: ControllerState | None


class Findings:
    """Takes samples, one after another: the same ones in the same order lead to the same figures
    and the same policy. All methods may be called from any thread."""

    def __init__(
        self,
        events: Events,
        figures: AuditFigures | None = None,
        controller: QualityController | None = None,
    ) -> None:
        """``controller`` steers the default policy, if anything does."""
        self.figures = figures or AuditFigures()
        self.controller = controller
        self._events = events

    def take(self, sample: Sample, *, own: bool = True) -> None:
        """Take a sample; ``own``: one of this server, whose metrics then count a fall of the
        agreement."""
        found = sample.found
        if found is not None and self.figures.add(
            sample.policy, sample.tenant, sample.kind, found, sample.time
        ):
            logger.warning(
                "Answers under %s agree with the full computation less often than before.",
                sample.policy,
            )
            if own:
                self._events.publish(AgreementFell(self.figures.name(sample.policy)))
        if self.controller is not None:
            agrees = found is None or found.agrees
            self.controller.note(sample.tenant, sample.policy, agrees, sample.time)

    def state(self) -> FindingsState:
        """Return the current state."""
        controller = None if self.controller is None else self.controller.state()
        return FindingsState(self.figures.state(), controller)

    def restore(self, state: FindingsState) -> bool:
        """Replace the current state by another; returns False if the default policy does not, since
        its ladder or its target was another one."""
        self.figures.restore(state.figures)
        if self.controller is None or state.controller is None:
            return True
        return self.controller.restore(state.controller)
