"""Learns how much answers under way slow down a request for its first byte."""

from __future__ import annotations

MOST_SHARE = 0.1
"""The share of itself by which a request's time to the first byte may grow with each answer under
way, and does until something else is measured: so it is where two processors compute a small
model. On a GPU, a step takes hardly longer for one more answer."""

SMOOTHING = 0.01
"""The share of the last request in the mean."""

MOST_ERROR = 3.0
"""An error of more times the expected seconds has another reason."""


class Slowdown:
    """Compares requests among many answers with requests among few, by a regression that forgets.
    ``MOST_SHARE`` is taken to have been found before, at a variance of one answer."""

    def __init__(self) -> None:
        self.share = MOST_SHARE
        """The share by which a request's time to the first byte grows with each answer."""
        self._requests = 0
        self._answers = self._error = 0.0  # in the mean
        self._variance = 0.0
        self._covariance = 0.0

    def note(self, answers: int, expected: float, seconds: float) -> None:
        """Note that a request had its first byte after so many seconds of so many expected, while
        so many answers were under way."""
        self._requests += 1
        more = answers - self._answers
        late = min(MOST_ERROR, seconds / expected - 1) - self._error
        newest = max(SMOOTHING, 1 / self._requests)
        self._answers += newest * more
        self._error += newest * late
        self._variance += SMOOTHING * (more**2 - self._variance)
        self._covariance += SMOOTHING * (more * late - self._covariance)
        learnt = (self._covariance + MOST_SHARE) / (self._variance + 1)
        self.share = min(MOST_SHARE, max(0.0, learnt))
