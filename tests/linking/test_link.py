"""The driver of policies: what is asked of a policy when, and what becomes of the prompt."""

import json

import numpy as np
import pytest

from kvlinker.base.errors import KVLinkerError, PolicyError
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunk_scores import ChunkScores, Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking import Forecast, Link, Needs, Policy, Variant, parse_policy
from kvlinker.prompting.segments import Prompt, ReusedPrefix
from tests.linking.test_policies import chunk_prompt

LAYERS = 4


def begin(policy, prompt, **options):
    return Link.begin(
        prompt, parse_policy(policy) if isinstance(policy, str) else policy, **options
    )


def scores_of(prompt):
    return [
        ChunkScores(
            Contextualization(n, 1.0), np.zeros(n, dtype=np.float32), np.arange(n, dtype=np.float32)
        )
        for n in (len(chunk) for chunk in prompt.chunks)
    ]


class Cost:
    """One operation per computed token and layer."""

    def flops(self, masks):
        return float(sum(mask.sum() for mask in masks))


class Deviating:
    def __init__(self, values):
        self.values = np.asarray(values, dtype=np.float32)

    def deviation(self, part):
        return self.values


def test_a_policy_that_needs_nothing_is_planned_at_once():
    prompt = chunk_prompt(5, 4, header=2)
    link = begin("legolink-2", prompt)
    assert not link.probing
    assert link.chunks == prompt.chunks
    assert link.computed == link.plan.runs
    assert link.with_scores([None, None]) is link
    assert link.usage() == Usage(5, 4, 5)
    assert link.refinement(LAYERS) is None


def test_what_was_computed_for_the_request_itself_is_fresh():
    prompt = chunk_prompt(5, 4, header=2)
    first, second = prompt.chunks
    link = begin("legolink-2", prompt)
    assert link.usage(made={first}) == Usage(2, 4, 8)
    assert link.usage(made={first, second}) == Usage(0, 4, 10)
    assert link.usage(made={Chunk((1, 2))}) == Usage(5, 4, 5)
    assert link.usage(made={first}, linked=False) == Usage(0, 9, 5)
    twice = Prompt((*prompt.segments, *prompt.segments))
    assert begin("naive", twice).usage(made={first}) == Usage(13, 0, 15), (
        "the second place reuses the first"
    )


def test_what_an_earlier_request_computed_in_a_chunk_that_was_made_anew_is_cached():
    """It is neither the made chunk's, nor subtracted twice where it is gone when the request's turn
    comes."""
    prompt = chunk_prompt(100, 50, header=10)
    own = np.arange(14)
    link = begin("legolink-4", prompt, reuse=lambda prompt, policy: ReusedPrefix(110, own))
    made = {prompt.chunks[0]}
    assert link.usage() == Usage(156, 4, 3, exact_cached_tokens=110)
    assert link.usage(made=made) == Usage(60, 4, 99, exact_cached_tokens=14)
    assert link.usage(made=set(prompt.chunks)) == Usage(14, 4, 145, exact_cached_tokens=14)
    assert link.usage(made=set(prompt.chunks)).without(14) == Usage(0, 4, 159)
    assert link.explanation(layers=LAYERS, cost=Cost(), made=made).fresh == ((14, 110), (160, 163))
    missed = link.explanation(layers=LAYERS, cost=Cost(), made=made, missed=own[4:])
    assert missed.fresh == ((4, 110), (160, 163))
    assert (missed.cost.cached_tokens, missed.cost.fresh_tokens) == (50, 109)


def test_chunks_that_are_not_placed_are_not_fetched():
    link = begin("full", chunk_prompt(5, 4, header=2))
    assert link.chunks == ()
    assert link.placed([]) == ()


def test_scores_are_gathered_before_there_is_a_plan():
    prompt = chunk_prompt(5, 4, header=2)
    link = begin("h2o-40", prompt)
    assert link.plan is None
    assert link.usage() == Usage(0, 0, 0)
    assert link.chunks == prompt.chunks
    assert link.computed == ((0, 2), (11, 14))
    linked = link.with_scores(scores_of(prompt))
    assert linked.plan.recomputed_tokens == 2 + 2
    assert linked.chunks == prompt.chunks
    assert [kv for _, kv in linked.placed(["a", "b"])] == ["a", "b"]


def test_what_is_fetched_for_scores_alone_is_not_placed():
    prompt = chunk_prompt(1, 4, header=2)
    linked = begin("h2o-100", prompt).with_scores(scores_of(prompt))
    assert linked.placed(["a", "b"]) == ()
    linked = begin("h2o-30", prompt).with_scores(scores_of(prompt))
    ((placement, kv),) = linked.placed(["a", "b"])  # the share of the first chunk is all of it
    assert (placement.start, kv) == (3, "b")


def test_the_questions_attention_takes_a_first_pass():
    prompt = chunk_prompt(5, 4, header=2)
    link = begin("query-20", prompt)
    assert link.probing
    assert link.plan.recomputed_tokens == 0
    assert len(link.placed(["a", "b"])) == 2
    assert link.refinement(LAYERS) is None
    attention = np.zeros((LAYERS, len(prompt)), dtype=np.float32)
    attention[:, [3, 9]] = 1
    second = link.with_attention(attention)
    assert not second.probing
    assert second.plan.recomputed_tokens == 2
    assert np.flatnonzero(second.plan.selections[0]).tolist() == [3, 9]
    assert second.chunks == link.chunks


def test_nothing_is_measured_where_there_is_nothing_to_choose():
    """The attention costs a pass, which a chunk that is exact and one that is reused do not
    need."""
    exact = chunk_prompt(5, header=2, first_prefix="header")
    link = begin("query-20+legolink-2", exact)
    assert not link.probing
    assert link.usage() == Usage(5, 0, 5)
    assert link.explanation(layers=LAYERS, cost=Cost()).scores == ()
    assert link.explanation(layers=LAYERS, cost=Cost()).cost.flops == 5 * LAYERS
    prompt = chunk_prompt(5, 4, header=2)
    reused = ReusedPrefix(11, np.arange(2))
    going = begin("query-20", prompt, reuse=lambda prompt, policy: reused)
    assert not going.probing
    assert going.usage() == Usage(11, 0, 3, exact_cached_tokens=11)
    assert begin(
        "query-20", prompt, reuse=lambda prompt, policy: ReusedPrefix(7, np.arange(2))
    ).probing


def test_scores_come_before_the_first_pass_where_both_are_needed():
    prompt = chunk_prompt(5, 4, header=2)
    link = begin("h2o-20+query-20", prompt)
    assert link.plan is None
    probing = link.with_scores(scores_of(prompt))
    assert probing.probing
    second = probing.with_attention(np.ones((LAYERS, len(prompt)), dtype=np.float32))
    assert np.flatnonzero(second.plan.selections[0]).tolist() == [6, 10]
    assert np.flatnonzero(second.plan.selections[1]).tolist() == [2, 3]


def test_forecasts_are_made_of_the_arranged_prompt_and_only_where_needed():
    prompt = chunk_prompt(50, 40, header=2)
    asked = []

    def forecast(arranged):
        asked.append(arranged)
        return Forecast(load=0.37, prefill=1.0)

    assert begin("cacheblend-15", prompt, forecast=forecast).forecast is None
    assert not asked
    link = begin("cacheblend-auto", prompt, forecast=forecast)
    assert asked == [prompt]
    assert link.asked.name == "cacheblend-auto"
    assert link.policy.name == "cacheblend-37"
    assert link.forecast == Forecast(load=0.37, prefill=1.0)
    assert begin("cacheblend-auto", prompt).policy.name == "cacheblend-15"


def test_variants_are_shown_to_policies_that_need_them_only():
    prompt = chunk_prompt(5, 4, header=2)
    exact = Chunk(prompt.chunks[0].tokens, tuple(prompt.tokens_before(0)))

    class Shelf:
        def variants(self, chunk):
            return (
                [Variant(exact, Contextualization(5, 0.0))] if chunk.tokens == exact.tokens else []
            )

    assert begin("prefix", prompt, library=Shelf()).chunks == (exact,)
    assert begin("prefix", prompt).chunks == ()
    assert begin("legolink-2", prompt, library=Shelf()).prompt is prompt


def test_refinements_count_in_usage_uses_and_explanations():
    prompt = chunk_prompt(8, 4, fresh=3)
    link = begin("cacheblend-50-onestep", prompt)
    refinement = link.refinement(LAYERS, explains=True)
    positions = np.arange(8, 15)
    assert refinement.keep(0, positions, Deviating(positions)).all()
    kept = refinement.keep(1, positions, Deviating(positions))
    assert np.flatnonzero(~kept).size
    dropped = int((~kept).sum())
    recomputed = round(4 - dropped * 3 / 4)
    assert link.usage(refinement, output_tokens=7) == Usage(12 - recomputed, recomputed, 3, 7)
    assert link.usage() == Usage(8, 4, 3)
    assert link.usage(refinement, made=set(link.prompt.chunks)) == Usage(
        0, recomputed, 15 - recomputed
    )
    assert [use.recomputed for use in link.uses(LAYERS, refinement)] == [
        0,
        (4 + (4 - dropped) * 3) / 16,
    ]
    explanation = link.explanation(refinement, layers=LAYERS, cost=Cost())
    assert explanation.cost.recomputed_tokens == recomputed
    assert explanation.cost.flops == 7 + 3 * (7 - dropped)
    assert explanation.cost.full_flops == 15 * LAYERS
    assert [score.name for score in explanation.scores] == ["key_deviation", "value_deviation"]
    assert (
        json.loads(json.dumps(explanation.to_json()))["settled_policy"] == "cacheblend-50-onestep"
    )


def test_the_first_pass_counts_in_the_cost():
    prompt = chunk_prompt(8, 4, fresh=3)
    link = begin("query-0", prompt).with_attention(np.ones((LAYERS, len(prompt)), dtype=np.float32))
    assert link.explanation(layers=LAYERS, cost=Cost()).cost.flops == 2 * 3 * LAYERS


def test_what_was_computed_in_full_is_all_recomputed():
    assert begin("naive", chunk_prompt(8, 4, fresh=3)).usage(linked=False) == Usage(0, 12, 3)


class Failing(Policy):
    """Raises where it is told to."""

    family = "failing-for-tests"
    needs = Needs(forecast=True, scores=True, question_attention=True, layers="every")

    place: str
    error: Exception

    def fail(self, place, value):
        if place == self.place:
            raise self.error
        return value

    def arrange(self, prompt, library):
        return self.fail("arrange", prompt)

    def settle(self, forecast):
        return self.fail("settle", self)

    def select(self, prompt, evidence):
        return self.fail("select", prompt.cached)

    def refine(self, evidence):
        return self.fail("refine", None)

    def explain(self, prompt, evidence):
        return self.fail("explain", ())


def go_through(policy):
    prompt = chunk_prompt(5, 4)
    link = Link.begin(prompt, policy).with_scores([None, None])
    link = link.with_attention(np.ones((LAYERS, len(prompt)), dtype=np.float32))
    refinement = link.refinement(LAYERS)
    assert refinement is not None
    assert refinement.keep(0, np.arange(len(prompt)), Deviating(np.ones(len(prompt)))).all()
    if refinement.error is not None:
        raise link.failed(refinement.error)
    return link.explanation(refinement, layers=LAYERS, cost=Cost())


@pytest.mark.parametrize("place", ["arrange", "settle", "select", "refine", "explain"])
def test_a_policy_that_fails_is_named_wherever_it_does(place, caplog):
    with pytest.raises(KVLinkerError, match="Policy failing-for-tests failed: out of ideas"):
        go_through(Failing(place, ValueError("out of ideas")))
    assert "out of ideas" in caplog.text
    with pytest.raises(PolicyError, match=r"^not like this$"):
        go_through(Failing(place, PolicyError("not like this")))


def test_a_policy_that_does_not_fail_comes_through():
    assert go_through(Failing("nowhere", ValueError())).cost.recomputed_tokens == 9


class Curious(Policy):
    """Looks at what it has not said that it needs."""

    family = "curious-for-tests"

    at: str

    def select(self, prompt, evidence):
        return (
            getattr(evidence, self.at)() if self.at == "question_attention" else evidence.scores(0)
        )


@pytest.mark.parametrize(
    ("at", "what"), [("question_attention", "question's attention"), ("scores", "scores")]
)
def test_looking_at_what_was_not_declared_says_so(at, what):
    with pytest.raises(KVLinkerError, match=f"{what}.* must say that it needs"):
        Link.begin(chunk_prompt(5), Curious(at))


def test_what_was_computed_in_just_this_sequence_is_not_fetched():
    """Its scores are asked for only where the policy cannot do without any."""
    prompt = chunk_prompt(4, 4, header=2)
    reused = ReusedPrefix(6, np.arange(6))
    link = begin("query-20-sensitive", prompt, reuse=lambda prompt, policy: reused)
    assert link.chunks == prompt.chunks[1:]
    scores = scores_of(prompt)[1:]
    told = link.with_scores(scores)
    assert told.evidence.scores(0) is None
    assert told.evidence.scores(1) is scores[0]
    assert [entry for _, entry in told.placed(["second"])] == ["second"]
    partly = ReusedPrefix(6, np.arange(5))
    link = begin("query-20-sensitive", prompt, reuse=lambda prompt, policy: partly)
    assert link.chunks == prompt.chunks
    link = begin("h2o-20", prompt, reuse=lambda prompt, policy: reused)
    assert link.chunks == prompt.chunks
