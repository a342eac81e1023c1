"""The progress of loading a model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

Report = Callable[[str, float], None]
"""A function of the current stage, such as ``reading``, and the finished share of all work, 0 to
1."""


def unreported(_what: str, _share: float, /) -> None:
    """Show nothing: the ``Report`` of callers without a user."""


def part_of(report: Report, begin: float, end: float) -> Report:
    """Return a report of a part of the work that takes it from share ``begin`` to ``end``."""

    def report_part(what: str, share: float) -> None:
        report(what, begin + (end - begin) * share)

    return report_part


IMPORTED = 0.2
"""The share of a model's loading (0 to 1) that is finished when all code is imported; chosen by
hand."""

LEAST_SHARE = 0.3
"""The finished share of the work (0 to 1) from which the remaining time is predicted: a start whose
checks are remembered goes from less to nearly the end, and would be thought to take ten seconds
longer than it does. Chosen by hand."""


class Loading:
    """Keeps the progress of loading a model. Any thread may report and read it."""

    def __init__(self, model: str) -> None:
        self.model = model
        self._began = time.monotonic()
        self._now = ("starting", 0.0)

    def report(self, what: str, share: float, /) -> None:
        """Note progress after the imports: a ``Report``."""
        self._now = (what, IMPORTED + (1 - IMPORTED) * share)

    @property
    def seconds_left(self) -> int | None:
        """The remaining seconds at the present speed; None while too little is finished to predict
        them."""
        _, share = self._now
        if share < LEAST_SHARE:
            return None
        return math.ceil((time.monotonic() - self._began) * (1 - share) / share)

    def __str__(self) -> str:
        what, share = self._now
        left = self.seconds_left
        rest = "" if left is None else f", about {left} s left"
        return f"Loading {self.model}: {what}, {share:.0%}{rest}"
