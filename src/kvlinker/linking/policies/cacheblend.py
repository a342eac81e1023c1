"""CacheBlend recomputes the tokens whose KV deviates most from what was cached, chosen layer by
layer: a given share of them, or as many as loading hides."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvlinker.linking.evidence import Evidence, Forecast, LayerEvidence
from kvlinker.linking.parameters import choice, number, percentage
from kvlinker.linking.policies.baselines import Full
from kvlinker.linking.policy import EVERY_LAYER, Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.linking.selection import highest, share
from kvlinker.prompting.segments import Prompt


@register
class CacheBlend(Policy):
    """Recompute the tokens with the highest KV deviation, chosen layer by layer, r percent on
    average (CacheBlend, section 4.3). Layer 0 computes all tokens; from layer 1 on ever fewer stay
    (gradual filtering): s·(1 + d/100) percent in layer 1, falling in equal steps to s·(1 - d/100)
    in the last, where s makes the average over all layers r (but is at least r/2, in models of few
    layers). With ``onestep``, layer 1 decides for all layers: s percent."""

    family = "cacheblend"

    percent: float = percentage()
    schedule: str = choice("when tokens are dropped", "gradual", "onestep")
    deviation: str = choice("what deviates", "kv", "k", "v")
    spread: float = number(
        "percent of s between its first and its average value", 0, 100, prefix="d", default=25
    )

    @property
    def needs(self) -> Needs:
        if not 0 < self.percent < 100:
            return Needs()
        return Needs(layers=1 if self.schedule == "onestep" else EVERY_LAYER)

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        return prompt.inexact if self.percent else np.zeros(len(prompt), dtype=np.bool_)

    def refine(self, evidence: LayerEvidence) -> NDArray[np.bool_] | None:
        if evidence.layer == 0:
            return None
        kept = share(self.kept_percent(evidence.layer, evidence.layers), evidence.selected)
        return highest(self._deviation(evidence), kept, among=evidence.cached)

    def kept_percent(self, layer: int, layers: int) -> float:
        """Return the percent of the tokens that stay in ``layer`` (from 1 on) of ``layers``."""
        if layers < 2:
            return self.percent
        average = max(self.percent / 2, (self.percent * layers - 100) / (layers - 1))
        if self.schedule == "onestep" or layers < 3:
            return average
        most = min(average * self.spread / 100, 100 - average)  # above the average in layer 1
        return average + most * (1 - 2 * (layer - 1) / (layers - 2))

    def _deviation(self, evidence: LayerEvidence) -> NDArray[np.float32]:
        deviation = np.zeros(len(evidence.positions), dtype=np.float32)
        if "k" in self.deviation:
            deviation += evidence.key_deviation()
        if "v" in self.deviation:
            deviation += evidence.value_deviation()
        return deviation


@register
class CacheBlendAuto(CacheBlend):  # type: ignore[misc]  # mypy does not know the defaults that ``choice`` gives
    """Recompute like CacheBlend, with the r that loading hides (CacheBlend, section 5.1): computing
    r percent of the chunks' tokens takes as long as reading the chunks from the tiers in which they
    lie, both as measured on this machine. At least ``percent``, also where nothing is measured;
    where loading would take longer than computing everything, everything is computed, and nothing
    loaded."""

    family = "cacheblend-auto"

    percent: float = percentage("percent at least", default=15)

    @property
    def needs(self) -> Needs:
        return super().needs | Needs(forecast=True)

    def settle(self, forecast: Forecast) -> Policy:
        percent = forecast.hidden_percent(self.percent)
        if percent == 100 > self.percent:
            return Full()
        return CacheBlend(
            max(self.percent, round(percent, 1)), self.schedule, self.deviation, self.spread
        )
