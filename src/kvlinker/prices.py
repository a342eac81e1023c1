"""What keeping chunk caches costs, by tier."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvlinker.errors import InvalidRequestError

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
