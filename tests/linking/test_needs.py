import pytest

from kvlinker.linking import Needs, known_policies, parse_policy

EVERYTHING = Needs(
    forecast=True,
    scores=True,
    sensitivity=True,
    variants=True,
    question_attention=True,
    layers="every",
    chunk_attention=True,
)


@pytest.mark.parametrize(
    ("one", "other", "both"),
    [
        (None, None, None),
        (None, 1, 1),
        (1, 1, 1),
        (1, 2, "every"),
        (1, "every", "every"),
        (None, "every", "every"),
    ],
)
def test_layers_of_two_policies(one, other, both):
    assert (Needs(layers=one) | Needs(layers=other)).layers == both
    assert (Needs(layers=other) | Needs(layers=one)).layers == both


@pytest.mark.parametrize(
    ("layers", "asked"), [(None, []), (1, [1]), ("every", [0, 1, 2]), (0, [0])]
)
def test_the_layers_in_which_a_policy_is_asked(layers, asked):
    assert [layer for layer in range(3) if Needs(layers=layers).refines_in(layer)] == asked
    assert Needs(layers=layers).refines == bool(asked)


def test_nothing_is_beyond_everything_and_everything_beyond_nothing():
    assert EVERYTHING.beyond(EVERYTHING) == ()
    assert Needs().beyond(Needs()) == ()
    assert len(EVERYTHING.beyond(Needs())) == 7
    assert Needs(sensitivity=True).beyond(Needs(scores=True)) == (
        "the sensitivity of chunks' tokens",
    )
    assert Needs(layers=1).beyond(Needs(layers=1)) == ()
    assert Needs(layers=2).beyond(Needs(layers=1)) == ("dropping tokens in layer 2",)
    assert Needs(layers="every").beyond(Needs(layers=1)) == ("dropping tokens in every layer",)


def test_what_is_beyond_is_named():
    assert parse_policy("query-5+cacheblend-auto-onestep").needs.beyond(Needs(layers=1)) == (
        "a forecast of loading and computing",
        "the question's attention",
    )


def test_policies_with_a_parameter_that_changes_nothing_need_nothing():
    for name in ("cacheblend-0", "cacheblend-100", "cacheblend-0-onestep"):
        assert parse_policy(name).needs == Needs()
    assert parse_policy("cachecraft-1").needs == Needs(scores=True, variants=True)


def test_needs_depend_on_nothing_but_the_policy():
    for family, policy in known_policies().items():
        assert isinstance(
            policy.parse("5" if policy.describe()["parameters"] else None).needs, Needs
        ), family
