import numpy as np
import pytest

from kvlinker.base.errors import PolicyError
from kvlinker.linking import EmptyLibrary, Evidence, Needs, Policy, make_plan, parse_policy
from kvlinker.linking.policy import Union
from kvlinker.linking.registry import MOST_PARTS
from tests.linking.test_policies import NOTHING, chunk_prompt, select, selected


def test_a_union_selects_what_any_part_selects():
    prompt = chunk_prompt(9, 12, 8, header=2)
    parts = ("legolink-2", "random-30", "attnlink-4")
    expected = np.logical_or.reduce([select(part, prompt) for part in parts])
    assert (select("+".join(parts), prompt) == expected).all()


def test_a_plan_keeps_what_every_part_selected():
    prompt = chunk_prompt(9, 12)
    plan = make_plan(prompt, parse_policy("legolink-2+random-30"), NOTHING)
    assert [np.flatnonzero(part).tolist() for part in plan.selections] == [
        selected("legolink-2", prompt),
        selected("random-30", prompt),
    ]
    assert plan.recomputed_tokens == len(
        {*selected("legolink-2", prompt), *selected("random-30", prompt)}
    )


@pytest.mark.parametrize(
    ("joined", "needs"),
    [
        ("naive+legolink-1", Needs()),
        ("query-5+legolink-1", Needs(question_attention=True)),
        ("h2o-5+query-5", Needs(question_attention=True, scores=True)),
        ("cacheblend-5+legolink-1", Needs(layers="every")),
        ("cacheblend-5-onestep+legolink-1", Needs(layers=1)),
        ("cacheblend-5-onestep+cacheblend-5", Needs(layers="every")),
        ("cacheblend-auto+query-5", Needs(forecast=True, question_attention=True, layers="every")),
        ("cachecraft-1+legolink-1", Needs(scores=True, variants=True)),
        (
            "legolink-1+cachecraft-1-focus",
            Needs(scores=True, variants=True, layers="every", chunk_attention=True),
        ),
        ("set-prefix+legolink-1", Needs(variants=True)),
    ],
)
def test_a_union_needs_what_any_part_needs(joined, needs):
    policy = parse_policy(joined)
    assert policy.needs == needs
    assert policy.positioned


def test_the_same_part_twice_counts_once():
    assert parse_policy("legolink-1+legolink-1") == parse_policy("legolink-1")
    assert parse_policy("legolink-1+random-5+legolink-1").name == "legolink-1+random-5"
    assert parse_policy("random-5.0+random-5").name == "random-5"


def test_order_matters_for_the_name_and_not_for_the_selection():
    prompt = chunk_prompt(9, 12)
    assert selected("random-30+legolink-2", prompt) == selected("legolink-2+random-30", prompt)


@pytest.mark.parametrize(
    "text", ["+legolink-1", "legolink-1+", "legolink-1++random-5", "+", "legolink-1+fancy-3"]
)
def test_a_part_that_is_no_policy_is_named(text):
    with pytest.raises(PolicyError, match=r"Unknown policy '(fancy-3)?'"):
        parse_policy(text)


def test_as_many_parts_as_are_allowed():
    most = [f"legolink-{k}" for k in range(1, MOST_PARTS + 1)]
    assert len(parse_policy("+".join(most)).parts) == MOST_PARTS


@pytest.mark.parametrize("more", [1, 2, 40])
def test_too_many_parts_are_answered_with_how_many_are_allowed(more):
    names = [f"legolink-{k}" for k in range(1, MOST_PARTS + more + 1)]
    with pytest.raises(PolicyError, match=f"{MOST_PARTS + more} policies .* at most {MOST_PARTS}"):
        parse_policy("+".join(names))


@pytest.mark.parametrize("joined", ["naive+naive-unpositioned", "naive-unpositioned+legolink-4"])
def test_policies_that_place_keys_differently_cannot_be_joined(joined):
    with pytest.raises(PolicyError, match="place keys alike"):
        parse_policy(joined)


def test_a_union_of_one_is_refused():
    with pytest.raises(PolicyError, match="two or more"):
        Union((parse_policy("naive"),))


def test_scores_of_all_parts_are_explained():
    prompt = chunk_prompt(3, 4, 5, fresh=2)
    attention = np.arange(2 * len(prompt), dtype=np.float32).reshape(2, -1)
    evidence = Evidence((None, None, None), attention)
    names = [
        score.name
        for score in parse_policy("cachecraft-1+legolink-1+query-3").explain(prompt, evidence)
    ]
    assert names == ["cci", "beta", "gamma", "cfo", "question_attention"]


class Arranging(Policy):
    """Remembers what it was asked to arrange."""

    family = "arranging"

    seen: list

    def arrange(self, prompt, library):
        self.seen.append(prompt)
        return prompt.with_chunks(prompt.chunks[::-1])

    def select(self, prompt, evidence):
        return np.zeros(len(prompt), dtype=bool)


def test_parts_arrange_one_after_the_other():
    prompt = chunk_prompt(3, 4)
    first, second = Arranging([]), Arranging([prompt])
    assert Union((first, second)).arrange(prompt, EmptyLibrary()).chunks == prompt.chunks
    assert first.seen == [prompt]
    assert second.seen[1].chunks == prompt.chunks[::-1]
