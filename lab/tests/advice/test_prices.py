"""Prices of tiers, as options give them."""

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.advice.recommendation import EXAMPLE_PRICES, parse_prices


def test_prices_are_examples_until_given():
    assert parse_prices([]) == EXAMPLE_PRICES
    assert parse_prices(["disk=0.5", "host=0"]) == EXAMPLE_PRICES | {"disk": 0.5, "host": 0.0}


BAD_PRICES = [
    ("tape=1", "Unknown tier 'tape'.*host, disk, redis, object"),
    ("1.5", "Unknown tier '1.5'"),
    ("disk", "'' is no price.*disk=0.1"),
    ("disk=cheap", "'cheap' is no price"),
    ("disk=-1", "'-1' is no price"),
    ("disk=nan", "'nan' is no price"),
    ("disk=inf", "'inf' is no price"),
    ("disk=1=2", "'1=2' is no price"),
]


def test_bad_prices_are_told(subtests):
    for text, message in BAD_PRICES:
        with subtests.test(text), pytest.raises(InvalidRequestError, match=message):
            parse_prices([text])
