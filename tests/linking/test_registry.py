import pytest

from kvlinker.base.errors import PolicyError
from kvlinker.linking import Policy, describe_policies, known_policies, parse_policy, register

NAMES = [
    "full",
    "naive",
    "naive-unpositioned",
    "prefix",
    "set-prefix",
    "legolink-16",
    "attnlink-8",
    "random-0",
    "random-15",
    "random-2.5",
    "h2o-10",
    "query-5",
    "cacheblend-15",
    "cacheblend-15-onestep-v",
    "cacheblend-7.5-k-d50",
    "cacheblend-auto",
    "cacheblend-auto-20",
    "cacheblend-auto-7.5-onestep-v",
    "cacheblend-auto+legolink-4",
    "cachecraft-0.3",
    "cachecraft-1-focus-w4",
    "query-5+legolink-16",
    "cacheblend-15+legolink-1+query-3",
]


def test_names_parse_back_to_the_same_policy(subtests):
    for name in NAMES:
        with subtests.test(name):
            policy = parse_policy(name)
            assert policy.name == name
            assert parse_policy(policy.name) == policy


BAD_NAMES = [
    "",
    "legolink",
    "legolink-",
    "legolink-0",
    "legolink--1",
    "legolink-x",
    "legolink-1.5",
    "legolink-16-4",
    "legolink-999999",
    "legolink-99999999999999999999",
    "attnlink-1",
    "random-101",
    "cacheblend-auto-101",
    "cacheblend-auto-",
    "cacheblend-auto-auto",
    "naive-3",
    "full-",
    "fuller",
    "Full",
    "nonsense",
    "legolink-١٦",
    "random-1e1",
    "random-.5",
    "random-nan",
    "cacheblend-15-gradual",
    "cacheblend-15-k-v",
    "cacheblend-15-d101",
    "cachecraft-1-focus-w0",
    "legolink-1+",
    "+",
    "legolink-1+nonsense",
    "naive+naive-unpositioned",
    "+".join(f"legolink-{k}" for k in range(1, 20)),
]


def test_bad_names_are_refused_by_name(subtests):
    for name in BAD_NAMES:
        with subtests.test(name[:40]):
            with pytest.raises(PolicyError) as caught:
                parse_policy(name)
            assert caught.value.param == "link.policy"


def test_unknown_policies_are_answered_with_the_known_ones():
    with pytest.raises(PolicyError, match=r"legolink-<tokens, 1 to 4096>"):
        parse_policy("blend-15")


def test_out_of_range_parameters_are_answered_with_the_range():
    with pytest.raises(PolicyError, match="from 1 to 4096"):
        parse_policy("legolink-999999")


def test_a_family_is_registered_once():
    assert "legolink" in known_policies()
    with pytest.raises(ValueError, match="registered already"):

        @register
        class Impostor(Policy):
            family = "legolink"

            def select(self, prompt, evidence):
                raise AssertionError(prompt)


def test_policies_are_described_with_what_an_engine_supports():
    def unsupported(policy):
        return "no tens" if "10" in policy.name or "onestep" in policy.name else None

    described = {entry["name"]: entry for entry in describe_policies(unsupported)}
    assert list(described) == list(known_policies())
    assert (described["naive"]["supported"], described["naive"]["restriction"]) == (True, None)
    assert (described["cacheblend"]["supported"], described["cacheblend"]["restriction"]) == (
        True,
        "no tens",
    )
    nothing = describe_policies(lambda policy: f"not {policy.family}")
    assert not any(entry["supported"] for entry in nothing)
    assert nothing[0]["restriction"] == "not attnlink"


def test_examples_have_every_choice_of_words():
    names = {policy.name for policy in known_policies()["cacheblend"].examples()}
    assert names == {
        f"cacheblend-50{schedule}{what}"
        for schedule in ("", "-onestep")
        for what in ("", "-k", "-v")
    }
    for family, policy in known_policies().items():
        for example in policy.examples():
            assert parse_policy(example.name) == example, family
