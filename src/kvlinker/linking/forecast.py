"""What loading a prompt's chunks is expected to take, beside computing them: for policies that go by it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds; None is not measured yet. ``load``: reading the prompt's chunks from the tiers in which they lie (what
    is in memory takes none), T_load. ``prefill``: computing all of their tokens as one text, T_prefill(L).
    ``overlaps``: computation can go on beside the loading; else one comes after the other."""

    load: float | None
    prefill: float | None
    overlaps: bool = True

    @property
    def worth_loading(self) -> bool:
        """Loading takes no longer than computing everything."""
        return self.load is not None and self.prefill is not None and self.load <= self.prefill

    def hidden_percent(self, least: float) -> float:
        """Percent of the tokens that can be computed again while the chunks are loaded, at no cost in time, but at
        least ``least`` (CacheBlend, section 5.1): the r with r · T_prefill = T_load, then max(r, r*), at most 100.

        Loading that overlaps with nothing hides nothing: the least, unless it would be quicker to compute everything.
        """
        if self.load is None or not self.prefill:
            return least
        percent = 100 * (self.load / self.prefill)
        if not self.overlaps:
            return 100.0 if percent + least > 100 else least
        return min(100.0, max(percent, least))
