from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import PolicyError
from kvlinker.linking import known_policies, parse_policy
from kvlinker.linking.parameters import WordParameter, declared

RANGES = {
    "legolink": "from 1 to 4096",
    "attnlink": "from 2 to 4096",
    "random": "from 0 to 100",
    "h2o": "from 0 to 100",
    "query": "from 0 to 100",
    "cacheblend": "from 0 to 100",
    "cacheblend-auto": "from 0 to 100",
    "cachecraft": "from 0 to 1000",
}


def values_of(parameter):
    if isinstance(parameter, WordParameter):
        return st.sampled_from(parameter.words)
    low, high = parameter.minimum, parameter.maximum
    if parameter.whole:
        return st.integers(low, high)
    return st.one_of(st.integers(low, high), st.floats(low, high))


@st.composite
def any_policy(draw):
    cls = draw(st.sampled_from(list(known_policies().values())))
    return cls(**{name: draw(values_of(parameter)) for name, parameter in declared(cls).items()})


@given(any_policy())
def test_every_policy_parses_back_from_its_name(policy):
    again = parse_policy(policy.name)
    assert again == policy
    assert hash(again) == hash(policy)
    assert again.name == policy.name


@given(any_policy(), any_policy())
def test_different_policies_have_different_names(one, other):
    assert (one == other) == (one.name == other.name)


@given(st.text("legolink-cachbdrw.0159nt+", max_size=20))
def test_what_parses_has_a_canonical_name(text):
    try:
        policy = parse_policy(text)
    except PolicyError as error:
        assert error.param == "link.policy"  # noqa: PT017
    else:
        assert parse_policy(policy.name) == policy


BAD_VALUES = ["0.0001x", "5000", "99999999999", "", "-3", "nan", "1e3"]


def test_bad_values_are_answered_with_value_and_range(subtests):
    for family, value in product(RANGES, BAD_VALUES):
        with subtests.test(f"{family}-{value}"):
            with pytest.raises(PolicyError) as caught:
                parse_policy(f"{family}-{value}")
            message = str(caught.value)
            low, high = RANGES[family].split()[1::2]
            assert family in message
            assert RANGES[family] in message or f"{low} to {high}" in message
            assert value.lstrip("-") in message


def test_a_missing_value_is_answered_with_the_range(subtests):
    for family in sorted(RANGES.keys() - {"cacheblend-auto"}):
        with subtests.test(family), pytest.raises(PolicyError, match=RANGES[family]):
            parse_policy(family)


BAD_WORDS = [
    ("cacheblend-15-d101", ["101", "from 0 to 100"]),
    ("cacheblend-15-d2.5", ["d2.5", "0 to 100"]),
    ("cachecraft-1-w0", ["0", "from 1 to 1000"]),
    ("cachecraft-1-focus-w1001", ["1001", "from 1 to 1000"]),
    ("cachecraft-1-w2.5", ["w2.5", "1 to 1000"]),
    ("cacheblend-15-twostep", ["twostep", "onestep"]),
    ("cacheblend-15-onestep-onestep", ["onestep"]),
    ("cacheblend-15-20", ["20", "0 to 100"]),
    ("naive-3", ["'3'", "naive"]),
    ("legolink-4+random-101", ["101", "from 0 to 100"]),
]


def test_bad_words_are_answered_with_what_is_allowed(subtests):
    for name, words in BAD_WORDS:
        with subtests.test(name):
            with pytest.raises(PolicyError) as caught:
                parse_policy(name)
            for word in words:
                assert word in str(caught.value)


def families() -> Mapping[str, Any]:
    """The policies' classes by family: each takes parameters of its own."""
    return known_policies()


def test_values_from_code_are_checked_too(subtests):
    for value in (float("nan"), float("inf"), -1, True, "15", None, 100.0001):
        complaint = f"is {value!r}, but must be a number from 0 to 100"
        with subtests.test(repr(value)), pytest.raises(PolicyError, match=complaint):
            families()["random"](percent=value)


@pytest.mark.parametrize(
    ("value", "name"), [(0.1 + 0.2, "random-0.3"), (1e-12, "random-0"), (-0.0, "random-0")]
)
def test_values_from_code_are_as_exact_as_they_are_written(value, name):
    policy = families()["random"](percent=value)
    assert policy.name == name
    assert parse_policy(name) == policy


def test_words_from_code_are_checked_too():
    for word in ("twostep", None, 3):
        with pytest.raises(PolicyError, match=f"is {word!r}, but must be gradual or onestep"):
            families()["cacheblend"](15, schedule=word)
    with pytest.raises(PolicyError, match="a whole number from 1 to 4096"):
        families()["legolink"](tokens=2.5)


def test_words_in_another_order_mean_the_same():
    assert parse_policy("cacheblend-d50-v-onestep-15") == parse_policy(
        "cacheblend-15-onestep-v-d50"
    )


def test_defaults_are_not_written():
    assert parse_policy("cacheblend-15.0-d25").name == "cacheblend-15"
    assert parse_policy("cachecraft-0.50-w2").name == "cachecraft-0.5"


def test_descriptions_name_every_parameter(subtests):
    for cls in known_policies().values():
        with subtests.test(cls.family):
            described = cls.describe()
            assert described["name"] == cls.family
            assert described["usage"].startswith(cls.family)
            assert described["description"]
            assert [row["name"] for row in described["parameters"]] == list(declared(cls))
            for row in described["parameters"]:
                assert row["type"] in ("choice", "integer", "number")
                if row["type"] == "choice":
                    assert row["default"] == row["values"][0]
                else:
                    assert row["minimum"] <= (row["default"] or row["minimum"]) <= row["maximum"]
