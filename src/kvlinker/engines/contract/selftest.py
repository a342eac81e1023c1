"""Shared by the self-tests of both engines: the prompt that they compute, and a check's result."""

from __future__ import annotations

from dataclasses import dataclass

PROMPT_TOKENS = 96
SCATTERED = ((5, 6), (17, 40), (61, 62), (70, 96))
"""Ranges that are overwritten with garbage and computed again; the last one ends the prompt."""

CHUNK = (23, 80)
"""The range that is stored, and linked where it was computed."""

GARBAGE = 100.0

TOLERANCE = 1e-4
"""Largest ‖ours − expected‖ / ‖expected‖ that passes where both are computed in fp32."""


@dataclass(frozen=True, slots=True)
class SelfTestCheck:
    """One check's result; ``error`` is relative: ‖ours − expected‖ / ‖expected‖."""

    name: str
    meaning: str
    error: float
    allowed: float = TOLERANCE

    @property
    def passed(self) -> bool:
        return self.error <= self.allowed  # false for NaN
