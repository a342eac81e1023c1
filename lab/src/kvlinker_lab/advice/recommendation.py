"""Recommends the tier to keep chunk caches in, for given prices (CacheBlend, section 5.1, turned
around)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvlinker.base.errors import InvalidRequestError
from kvlinker.linking.evidence import Forecast

EXAMPLE_PRICES = {"host": 3.0, "disk": 0.08, "redis": 5.0, "object": 0.023}
"""Prices per GB and month: about what large clouds ask in US dollars. Yours differ."""

_GB = 1e9
"""The bytes of a gigabyte, as clouds bill it."""


def parse_prices(texts: Sequence[str], others: Iterable[str] = ()) -> dict[str, float]:
    """Return ``EXAMPLE_PRICES`` with what ``TIER=NUMBER`` texts say otherwise, of ``others``, too.
    Raises InvalidRequestError."""
    prices = dict(EXAMPLE_PRICES)
    known = list(dict.fromkeys((*prices, *others)))
    for text in texts:
        tier, _, number = text.partition("=")
        if tier not in known:
            raise InvalidRequestError(
                f"Unknown tier {tier!r} in --price {text}: known are {', '.join(known)}, as in"
                " --price disk=0.1.",
                param="price",
            )
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            raise InvalidRequestError(
                f"--price {text}: {number!r} is no price. Give a number per GB and month, such as"
                f" {tier}=0.1.",
                param="price",
            )
        prices[tier] = price
    return prices


@dataclass(frozen=True, slots=True)
class TierFigures:
    """The time to load a context from one tier, and that of a policy's concurrent computation."""

    tier: str
    codec: str
    bytes_per_token: float
    """Bytes as the tier stores them."""
    bytes_per_second: float
    busy_percent: float
    """The share of the loading time in which reading keeps a processor busy."""
    overlaps: bool
    """True if computation and loading can run concurrently: on other processors, or because reading
    mostly waits."""
    load_seconds: float
    """T_load: the bytes of the context over the tier's bandwidth."""
    prefill_seconds: float
    """T_prefill: computing the whole context."""
    percent: float
    """r: what the policy recomputes of the context."""
    price_per_gb: float
    """The price per GB and month."""

    @property
    def recompute_seconds(self) -> float:
        """T_recompute(r) = r · T_prefill."""
        return self.percent / 100 * self.prefill_seconds

    @property
    def hidden_percent(self) -> float:
        """The r that makes T_recompute(r) equal to T_load, at most 100; 0 if loading overlaps with
        nothing."""
        if not self.overlaps:
            return 0.0
        return Forecast(self.load_seconds, self.prefill_seconds).hidden_percent(0)

    @property
    def hidden(self) -> bool:
        """True if loading takes no longer than the concurrent computation."""
        return self.overlaps and self.load_seconds <= self.recompute_seconds

    @property
    def added_seconds(self) -> float:
        """The time that loading adds to the computation."""
        return (
            max(0.0, self.load_seconds - self.recompute_seconds)
            if self.overlaps
            else self.load_seconds
        )

    @property
    def price_per_million_tokens(self) -> float:
        """The price of keeping a million tokens for a month."""
        return self.price_per_gb * self.bytes_per_token * 1e6 / _GB


def recommend(tiers: Sequence[TierFigures]) -> TierFigures | None:
    """Return the cheapest tier whose loading is hidden, the faster one of two that cost the same;
    None if none is."""
    hidden = [tier for tier in tiers if tier.hidden]
    return min(
        hidden, key=lambda tier: (tier.price_per_million_tokens, tier.load_seconds), default=None
    )


def explain_recommendation(tiers: Sequence[TierFigures]) -> list[str]:
    """Describe the recommended tier and the time that cheaper tiers would add, or the ways to hide
    loading."""
    by_price = sorted(tiers, key=lambda tier: tier.price_per_million_tokens)
    chosen = recommend(tiers)
    if chosen is None:
        return [
            "No tier's loading is hidden. What there is:",
            *(f"- {way}" for way in _ways_out(by_price)),
        ]
    return [
        (
            f"Recommended: {chosen.tier}, the cheapest tier whose loading is hidden:"
            f" {1e3 * chosen.load_seconds:.0f} ms during {1e3 * chosen.recompute_seconds:.0f} ms of"
            " computation."
        ),
        *(
            f"- {tier.tier} is cheaper, and adds {_describe_added(tier)}"
            for tier in by_price
            if tier.price_per_million_tokens < chosen.price_per_million_tokens
        ),
    ]


def _ways_out(by_price: Sequence[TierFigures]) -> list[str]:
    """Say how much computation would hide each tier's loading, the cheapest tier first."""
    found = []
    for tier in by_price:
        if not tier.overlaps:
            found.append(f"the {tier.tier} tier adds {_describe_added(tier)}")
        elif tier.hidden_percent < 100:
            percent = math.ceil(10 * tier.hidden_percent) / 10
            found.append(
                f"recomputing {percent:g}% or more, such as cacheblend-{percent:g}, with the"
                f" {tier.tier} tier"
            )
    return found or ["computing everything: no tier delivers as fast as the model computes"]


def _describe_added(tier: TierFigures) -> str:
    text = f"{1e3 * tier.added_seconds:.0f} ms"
    if tier.overlaps:
        return text
    return (
        f"{text} (reading keeps a processor busy for {tier.busy_percent:.0f}% of that time, and so"
        " comes before the computation)"
    )
