"""What the engine says about a prompt under a policy, against what it does."""

import json
import queue
from dataclasses import replace

import numpy as np
import pytest

from kvlinker.base.events import Event
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import Finished, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from tests.engines.embedded.conftest import (
    EVERY_POLICY,
    last_attention,
    linked_prompt,
    random_tokens,
)
from tests.engines.embedded.execution.test_oracle import computed_layers

TWICE = Chunk(random_tokens(17, 5))
PROMPTS = {
    "header and fresh text between": linked_prompt(31, 22, 19, header=5, middle=3),
    "ends in a chunk": linked_prompt(23, 30, fresh=0, seed=2),
    "one-token chunks": linked_prompt(1, 1, 1, fresh=1, seed=3),
    "only a chunk": linked_prompt(12, fresh=0, seed=4),
    "the same chunk twice": Prompt(
        (*map(CachedSegment, (TWICE, Chunk(random_tokens(9, 6)), TWICE)), FreshSegment((7, 8)))
    ),
    "no chunk at all": linked_prompt(fresh=14, seed=5),
    "one token": linked_prompt(fresh=1, seed=6),
}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss-sinks"])
def test_an_explanation_is_what_a_generation_does(bench, family, prompt):
    made = bench(family, max_step_tokens=16)
    made.cache(prompt)
    layers = len(made.loaded.layers)
    for policy in EVERY_POLICY:
        explanation = made.explain(prompt, policy)
        finished = made.answer(prompt, policy, max_tokens=1, explains=True).finished
        usage = finished.usage
        timeless = {"attention": None, "forecast": None}
        assert (
            replace(finished.explanation, **timeless).to_json()
            == replace(explanation, forecast=None).to_json()
        )
        cost = explanation.cost
        assert explanation.policy == policy
        assert explanation.tokens == len(prompt)
        assert (cost.cached_tokens, cost.recomputed_tokens, cost.fresh_tokens) == (
            usage.cached_tokens,
            usage.recomputed_tokens,
            usage.fresh_tokens,
        ), policy
        assert cost.cached_tokens + cost.recomputed_tokens + cost.fresh_tokens == len(prompt)
        masks = computed_layers(explanation, layers)
        assert cost.recomputed_tokens == round(masks.sum() / layers)
        assert not masks[:, ~prompt.cached].any()
        assert masks[:, -1].all() or not prompt.cached[-1]
        assert (masks[1:] <= masks[:-1]).all()
        again = json.loads(json.dumps(explanation.to_json()))
        assert again["policy"] == policy
        assert sum(segment["tokens"] for segment in again["segments"]) == len(prompt)
        recomputed = [
            (row["last"] - row["first"] + 1) * row["recomputed_tokens"] for row in again["layers"]
        ]
        assert sum(recomputed) == masks.sum()


def test_segments_tell_where_their_kv_comes_from(bench):
    made = bench()
    head, prefix = random_tokens(4, 1), random_tokens(6, 2)
    chunks = [
        Chunk(random_tokens(9, 3), head),
        Chunk(random_tokens(8, 4)),
        Chunk(random_tokens(7, 5), prefix),
    ]
    prompt = Prompt(
        (FreshSegment(head), *map(CachedSegment, chunks), FreshSegment(()), FreshSegment((5,)))
    )
    segments = made.explain(prompt, "naive").segments
    assert [
        (s.kind, s.start, s.tokens, s.content, s.exact, s.computed_behind) for s in segments
    ] == [
        ("fresh", 0, 4, None, None, None),
        ("chunk", 4, 9, chunks[0].content, True, 4),
        ("chunk", 13, 8, chunks[1].content, False, 0),
        ("chunk", 21, 7, chunks[2].content, False, 6),
        ("fresh", 28, 1, None, None, None),
    ]


def states(explanation, layers):
    """What became of each token in each layer, [layers, length], as a reader of the JSON puts it
    together."""
    told = explanation.to_json()
    found = np.full((layers, told["tokens"]), "cached", dtype=object)
    for begin, end in told["fresh"]:
        found[:, begin:end] = "fresh"
    for row in told["layers"]:
        for begin, end in row["recomputed"]:
            found[row["first"] : row["last"] + 1, begin:end] = "recomputed"
    return found


def counts(explanation, layers):
    """Cached, recomputed and fresh tokens, averaged over the layers."""
    found = states(explanation, layers)
    return [round((found == state).sum() / layers) for state in ("cached", "recomputed", "fresh")]


def used(usage):
    return [usage.cached_tokens, usage.recomputed_tokens, usage.fresh_tokens]


@pytest.mark.parametrize("policy", ["naive", "legolink-4", "cacheblend-20", "query-10"])
def test_tokens_by_state_add_up_to_the_usage(bench, policy):
    """First the chunks are computed for this very request, then its beginning is reused, then
    chunks are cached."""
    made = bench(prefix_cache="on")
    prompt = PROMPTS["header and fresh text between"]
    fresh, reused = [], []
    for asked in (prompt, prompt, Prompt((FreshSegment((9,)), *prompt.segments))):
        finished = made.answer(asked, policy, max_tokens=1, explains=True).finished
        assert counts(finished.explanation, 3) == used(finished.usage)
        assert finished.explanation.token_ids == tuple(asked.tokens.tolist())
        fresh.append(finished.usage.fresh_tokens)
        reused.append(finished.explanation.reused_tokens)
    chunks = sum(map(len, prompt.chunks))
    assert fresh[0] > fresh[2] == len(asked) - chunks
    assert fresh[1] < fresh[0]
    assert reused[0] == reused[2] == 0
    assert reused[1] > 0 or parse_policy(policy).needs.refines, (
        "of what is refined, the part before the chunks is kept"
    )


def test_only_the_first_of_several_choices_explains(bench):
    made = bench()
    request = GenerationRequest(
        PROMPTS["only a chunk"], parse_policy("naive"), SamplingParams(max_tokens=2), n=2
    )
    events: queue.SimpleQueue = queue.SimpleQueue()
    made.engine.generate(replace(request, explains=True), lambda *event: events.put(event))
    ended: dict = {}
    while len(ended) < 2:
        choice, event = events.get(timeout=60)
        if isinstance(event, Finished):
            ended[choice] = event.explanation
    assert ended[0].attention is None
    assert ended[1] is None


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_attention_is_the_models_own_where_all_is_computed(bench, family):
    made = bench(family, max_step_tokens=16)
    prompt = PROMPTS["header and fresh text between"]
    attention = made.explain(prompt, "full", attention=True).attention
    np.testing.assert_allclose(attention, last_attention(family, prompt), atol=2e-6)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_attention_is_that_of_the_last_pass(bench, policy):
    made = bench()
    prompt = PROMPTS["header and fresh text between"]
    made.cache(prompt)
    explanation = made.answer(prompt, policy, max_tokens=3, explains=True).finished.explanation
    assert explanation.attention.shape == (3, len(prompt))
    np.testing.assert_allclose(explanation.attention.sum(1), 1, atol=1e-5)
    told = explanation.to_json()["attention"]
    np.testing.assert_allclose(told, explanation.attention, rtol=6e-3)
    assert made.explain(prompt, policy).to_json()["attention"] is None


def test_attention_without_repair_is_that_of_the_question_pass(bench):
    """The first pass of ``query`` sees what ``naive`` gives."""
    made = bench()
    prompt = PROMPTS["header and fresh text between"]
    (asked,) = made.explain(prompt, "query-10").scores
    attention = made.explain(prompt, "naive", attention=True).attention
    np.testing.assert_allclose(attention.mean(0)[asked.positions], asked.values, atol=1e-6)


def arithmetic(made, masks):
    """2 per weight and token outside of embeddings and head; 2 · (key_dim + value_dim) per head,
    query and key."""
    model = made.loaded.model
    weights = (
        sum(parameter.numel() for parameter in model.model.layers.parameters())
        + model.model.norm.weight.numel()
    )
    total = 0
    for mask in masks:
        for position in np.flatnonzero(mask):
            total += 2 * weights / len(masks) + 4 * (16 + 16) / 2 * 4 * (position + 1)
    return total


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_costs_add_up(bench, policy):
    """4 heads of 16; a policy that probes pays for two passes over the fresh tokens, and the last
    one of all."""
    made = bench()
    prompt = (
        PROMPTS["ends in a chunk"]
        if "random" in policy
        else PROMPTS["header and fresh text between"]
    )
    explanation = made.explain(prompt, policy)
    masks = computed_layers(explanation, 3) | ~prompt.cached
    first_pass = [~prompt.cached] * 3 if "query" in policy else []
    assert explanation.cost.flops == pytest.approx(
        arithmetic(made, [*masks]) + arithmetic(made, first_pass)
    )
    assert explanation.cost.full_flops == pytest.approx(
        arithmetic(made, [np.ones(len(prompt), dtype=bool)] * 3)
    )
    ratio = explanation.to_json()["cost"]["flops_ratio"]
    assert ratio == explanation.cost.flops / explanation.cost.full_flops
    assert ratio == pytest.approx(1) if policy in ("full", "prefix", "set-prefix") else ratio < 1


NAMES = {
    "legolink-4": set(),
    "h2o-30": {"received_attention"},
    "cacheblend-20": {"key_deviation", "value_deviation"},
    "cacheblend-20-v": {"value_deviation"},
    "cachecraft-1": {"cci", "beta", "gamma", "cfo", "inter_attention"},
    "cachecraft-1-focus": {"cci", "beta", "gamma", "cfo", "inter_attention", "chunk_attention"},
    "query-10": {"question_attention"},
    "query-10-sensitive": {"question_attention", "sensitivity"},
    "query-10+legolink-2": {"question_attention"},
    "h2o-10+cacheblend-20-k": {"received_attention", "key_deviation"},
}


@pytest.mark.parametrize("policy", NAMES)
def test_the_figures_of_every_policy_are_shown(bench, policy):
    made = bench(changes={"num_hidden_layers": 6})
    prompt = PROMPTS["header and fresh text between"]
    explanation = made.explain(prompt, policy)
    assert {score.name for score in explanation.scores} == NAMES[policy]
    for score in explanation.scores:
        assert len(score.values) == (3 if score.positions is None else len(score.positions))
        assert score.positions is None or prompt.cached[score.positions].all()
        assert np.isfinite(score.values).all()


def test_a_prompt_that_fills_the_pool_is_explained(bench):
    made = bench(kv_slots=64)
    prompt = linked_prompt(fresh=64)
    request = GenerationRequest(prompt, parse_policy("naive"), SamplingParams(max_tokens=0))
    assert made.engine.explain(request).result(timeout=60).tokens == 64
    assert made.answer(linked_prompt(fresh=9), "naive", max_tokens=1).failed is None


def test_an_explanation_samples_nothing_and_leaves_nothing(bench):
    made = bench()
    prompt = PROMPTS["header and fresh text between"]
    made.cache(prompt)
    finished: list[Event] = []
    made.events.subscribe(finished.append)
    made.explain(prompt, "query-10+cacheblend-20")
    made.settle()
    assert [type(event).__name__ for event in finished if "Request" in type(event).__name__] == []
