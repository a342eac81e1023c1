"""Which tier to keep chunk caches in, for given prices (CacheBlend, section 5.1, turned around)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvlinker.errors import InvalidRequestError
from kvlinker.linking.evidence import Forecast
from kvlinker.store.loading.bandwidth import LoadTime, speed_values

EXAMPLE_PRICES = {"host": 3.0, "disk": 0.08, "redis": 5.0, "object": 0.023}
"""Per GB and month: about what large clouds ask in US dollars. Yours differ."""


def parse_prices(texts: Sequence[str]) -> dict[str, float]:
    """``EXAMPLE_PRICES`` with what ``TIER=NUMBER`` texts say otherwise. Raises InvalidRequestError."""
    prices = dict(EXAMPLE_PRICES)
    for text in texts:
        tier, _, number = text.partition("=")
        if tier not in prices:
            raise InvalidRequestError(
                f"Unknown tier {tier!r} in --price {text}: known are {', '.join(prices)}, as in --price disk=0.1.",
                param="price",
            )
        try:
            price = float(number)
        except ValueError:
            price = math.nan
        if not 0 <= price < math.inf:
            raise InvalidRequestError(
                f"--price {text}: {number!r} is no price. Give a number per GB and month, such as {tier}=0.1.",
                param="price",
            )
        prices[tier] = price
    return prices


_GB = 1e9


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier for contexts of a given length. Seconds are T_load and T_recompute(r); ``hidden_percent`` is the r that
    makes them equal. Reading keeps a processor busy for ``busy_percent`` of T_load; it ``overlaps`` with computation
    unless that needs the processor. ``bytes_per_token`` as the tier stores them, ``smaller``: by codecs that take
    fewer."""

    tier: str
    codec: str
    bytes_per_second: float
    busy_percent: float
    overlaps: bool
    bytes_per_token: float
    load_seconds: float
    recompute_seconds: float
    hidden_percent: float
    price_per_gb: float
    smaller: Mapping[str, float]

    @property
    def hidden(self) -> bool:
        """Loading takes no longer than the computation beside it."""
        return self.overlaps and self.load_seconds <= self.recompute_seconds

    @property
    def added_seconds(self) -> float:
        """What loading adds to the computation."""
        return max(0.0, self.load_seconds - self.recompute_seconds) if self.overlaps else self.load_seconds

    @property
    def price_per_million_tokens(self) -> float:
        return self.price_per_gb * self.bytes_per_token * 1e6 / _GB


def figures_of(
    tier: str,
    *,
    codec: str,
    delivered: tuple[int, LoadTime],
    on_host: bool,
    bytes_per_token: float,
    smaller: Mapping[str, float],
    context_tokens: int,
    prefill_seconds: float,
    percent: float,
    price_per_gb: float,
) -> TierFigures:
    """T_load = bytes of the context / bandwidth; T_recompute(r) = r · T_prefill. ``delivered``: bytes, and what reading
    them took. ``on_host``: the model computes where chunks are read."""
    rate, busy = speed_values(*delivered)
    load = context_tokens * bytes_per_token / rate
    overlaps = delivered[1].waits or not on_host
    return TierFigures(
        tier=tier,
        codec=codec,
        bytes_per_second=rate,
        busy_percent=100 * busy,
        overlaps=overlaps,
        bytes_per_token=bytes_per_token,
        load_seconds=load,
        recompute_seconds=percent / 100 * prefill_seconds,
        hidden_percent=Forecast(load, prefill_seconds, overlaps).hidden_percent(0),
        price_per_gb=price_per_gb,
        smaller=smaller,
    )


def recommended(tiers: Sequence[TierFigures]) -> TierFigures | None:
    """The cheapest of those whose loading is hidden, the faster one of two that cost the same."""
    hidden = [tier for tier in tiers if tier.hidden]
    return min(hidden, key=lambda tier: (tier.price_per_million_tokens, tier.load_seconds), default=None)


def cheaper(tiers: Sequence[TierFigures], chosen: TierFigures) -> list[str]:
    """The tiers that would cost less than the chosen one, and what they add."""
    return [
        f"{tier.tier} is cheaper, and adds {1e3 * tier.added_seconds:.0f} ms{_reason(tier)}"
        for tier in sorted(tiers, key=lambda tier: tier.price_per_million_tokens)
        if tier.price_per_million_tokens < chosen.price_per_million_tokens
    ]


def ways_out(tiers: Sequence[TierFigures]) -> list[str]:
    """What would hide loading where no tier does: fewer bytes, or more computation."""
    found = []
    for tier in sorted(tiers, key=lambda tier: tier.price_per_million_tokens):
        if not tier.overlaps:
            found.append(f"the {tier.tier} tier adds {1e3 * tier.added_seconds:.0f} ms{_reason(tier)}")
            continue
        for codec, nbytes in tier.smaller.items():
            seconds = tier.load_seconds * nbytes / tier.bytes_per_token
            if seconds <= tier.recompute_seconds:
                found.append(
                    f"codec {codec} for the {tier.tier} tier: loading would take about {1e3 * seconds:.0f} ms at the "
                    "same bytes per second"
                )
                break
        if tier.hidden_percent < 100:
            percent = math.ceil(10 * tier.hidden_percent) / 10
            found.append(f"recomputing {percent:g}% or more, such as cacheblend-{percent:g}, with the {tier.tier} tier")
    return found or ["computing everything: no tier delivers as fast as the model computes"]


def _reason(tier: TierFigures) -> str:
    if tier.overlaps:
        return ""
    busy = f"{tier.busy_percent:.0f}%"
    return f" (reading keeps a processor busy for {busy} of that time, and so comes before the computation)"
