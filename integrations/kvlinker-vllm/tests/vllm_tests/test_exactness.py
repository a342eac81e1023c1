"""What vLLM answers over linked KV is what transformers answers with the same tokens computed and
placed."""

import asyncio
import os
import secrets
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.engines.embedded.test_policy_references import blended

from kvlinker.base.types.chunks import Chunk
from kvlinker.engines.contract.sensitivity import sensitivity
from kvlinker.engines.native.placing import native_placing
from kvlinker.linking import Evidence, parse_policy
from kvlinker.linking.evidence import EmptyLibrary
from kvlinker.linking.plan import layer_masks
from kvlinker.linking.selection import highest, share
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker_vllm.protocol.transfer_plan import plan_capture
from kvlinker_vllm.worker.fused_placing import FusedPlacing
from vllm_tests.linked_vllm import (
    LinkedVLLM,
    difference,
    difference_from,
    outcome_of,
    reference,
    transfer_for,
)

TOLERANCE = 1e-5
MORE_STEPS_TOLERANCE = 4e-5
"""For answers that are longer, or many: vLLM's own rounding errors exceed the other one once in a
while; 2.1e-5 was seen."""
FAMILIES = ["llama", "llama3-rope", "yarn", "qwen3", "mistral", "gemma2-softcap"]
OPTIONS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
        }
    }
}
"""Options of vLLM's that a family's tests run with: drafts from the text, here."""

POLICIES = [
    "full",
    "naive",
    "legolink-16",
    "legolink-64",
    "attnlink-9",
    "random-30",
    "random-90",
    "prefix",
]
UNALIGNED = (97, 156, 130, 61)
BLOCK = 32


@pytest.fixture(scope="module", params=FAMILIES)
def linked(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    options = OPTIONS.get(request.param, {})
    made = LinkedVLLM(
        request.param, folder / "models", folder / "state", num_gpu_blocks_override=256, **options
    )
    yield made
    made.settle()
    made.close()


@pytest.fixture(scope="module")
def prompt(linked):
    prompt = linked_prompt(*UNALIGNED, header=5, middle=3)
    linked.cache(prompt)
    return prompt


@pytest.mark.runner_v2
def test_the_model_runner_is_the_one_that_was_asked_for(linked):
    second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    wanted = "vllm.v1.worker." + ("gpu.model_runner" if second else "gpu_model_runner")
    assert wanted in {each.__module__ for each in type(linked.runner).__mro__}
    if second or native_placing() is not None:  # there, chunks are placed by kvlinker's kernels
        assert isinstance(linked.launches.__self__, FusedPlacing)


@pytest.mark.smoke
@pytest.mark.runner_v2
@pytest.mark.parametrize("policy", [*POLICIES, "naive-unpositioned"])
def test_every_policy_equals_the_oracle(linked, prompt, policy):
    output = linked.answer(prompt, policy)
    assert difference(output, prompt, policy, linked.family) < TOLERANCE
    assert outcome_of(output).linked
    assert outcome_of(output).queued > 0


@pytest.mark.parametrize(
    "policy", ["h2o-20", "cachecraft-0.7", "cachecraft-1.4", "h2o-10+cachecraft-0.5+legolink-2"]
)
def test_policies_that_look_at_scores_equal_the_oracle(linked, prompt, policy):
    """Over the scores that vLLM's own passes collected; the engine's tests compare these with the
    embedded engine's."""
    evidence = linked.evidence(prompt)
    recomputed = parse_policy(policy).select(prompt, evidence).sum()
    assert 0 < recomputed < prompt.inexact.sum()
    output = linked.answer(prompt, policy, evidence=evidence)
    assert difference(output, prompt, policy, linked.family, evidence) < TOLERANCE


def test_set_prefix_puts_the_exact_chunks_first(linked, prompt):
    arranged = parse_policy("set-prefix").arrange(prompt, EmptyLibrary())
    output = linked.answer(arranged, "set-prefix")
    assert difference(output, arranged, "set-prefix", linked.family) < TOLERANCE


@pytest.mark.parametrize(
    ("policy", "percent", "parts", "lego"),
    [
        ("cacheblend-40-onestep", 40, "kv", 0),
        ("cacheblend-30-onestep-k", 30, "k", 0),
        ("cacheblend-60-onestep-v", 60, "v", 0),
        ("cacheblend-40-onestep+legolink-8", 40, "kv", 8),
    ],
)
def test_cacheblend_in_one_step(linked, prompt, policy, percent, parts, lego):
    """Also where a comparison takes several slices, beside a neighbour that decodes."""
    oracle = reference(prompt, linked.family)
    also = (
        parse_policy(f"legolink-{lego}").select(prompt, Evidence())
        if lego
        else np.zeros(len(prompt), bool)
    )
    masks = blended(oracle, percent, onestep=True, parts=parts, also=also)
    expected = [masks[0], *[masks[1]] * (oracle.layers - 1)]
    assert masks[1].sum() < masks[0].sum()
    for neighbours in (0, 1):
        for _ in range(neighbours):
            linked.add(list(random_tokens(30, 4)), max_tokens=60)
        link = linked.refined(prompt, policy)
        computed = [
            mask & prompt.cached
            for mask in layer_masks(link.plan, oracle.layers, link.refinement.dropped)
        ]
        np.testing.assert_array_equal(computed, expected)
        assert difference_from(linked.follow(link, max_tokens=4), oracle, expected) < TOLERANCE


def asked_for(oracle, percent):
    """The tokens that ``query`` selects by transformers' attention matrices: a mask, [tokens]."""
    first_pass = oracle.run([np.zeros(len(oracle.prompt), dtype=bool)])
    attention = (
        torch.stack([weights.mean(0)[-1] for weights in first_pass.attention])
        .mean(0)
        .double()
        .numpy()
    )
    return highest(attention, share(percent, int(oracle.inexact.sum())), among=oracle.inexact)


@pytest.mark.parametrize(
    ("policy", "neighbours"),
    [
        ("query-10", 0),
        ("query-10+legolink-4", 1),
        ("query-0", 0),
        ("query-100", 1),
        ("query-5+h2o-10", 0),
    ],
)
def test_policies_that_look_at_the_question(linked, prompt, policy, neighbours):
    """The second pass finds the first one's KV in vLLM's prefix cache, but for its last block, and
    repairs it there; with windows, it places all of it again."""
    for _ in range(neighbours):
        linked.add(list(random_tokens(30, 4)), max_tokens=60)
    oracle = reference(prompt, linked.family)
    query, *others = policy.split("+")
    expected = asked_for(oracle, float(query.removeprefix("query-")))
    for other in others:
        expected |= parse_policy(other).select(prompt, linked.evidence(prompt))
    link = linked.refined(prompt, policy)
    np.testing.assert_array_equal(
        link.plan.selections[0], asked_for(oracle, float(query.removeprefix("query-")))
    )
    with linked.local_hits() as found:
        output = linked.follow(link, max_tokens=4)
    assert difference_from(output, oracle, [expected] * oracle.layers) < TOLERANCE
    assert outcome_of(output).linked
    hit = link.first_pass.linked // BLOCK * BLOCK
    several = len(linked.scheduler.kv_cache_config.kv_cache_groups) > 1
    assert found[-1] == (0 if several else hit)  # what windows see is to be placed again


@pytest.mark.parametrize("observers_place", [True, False])
def test_a_first_pass_finds_chunks_or_places_them(linked, prompt, observers_place, monkeypatch):
    """Layer by layer, or on GPUs, the pass that observes places them; else they are there."""
    monkeypatch.setattr(linked.passes, "_observers_place", observers_place)
    oracle = reference(prompt, linked.family)
    link = linked.refined(prompt, "query-10")
    expected = asked_for(oracle, 10)
    np.testing.assert_array_equal(link.plan.selections[0], expected)
    output = linked.follow(link, max_tokens=4)
    assert difference_from(output, oracle, [expected] * oracle.layers) < TOLERANCE


@pytest.mark.runner_v2
def test_the_question_and_deviations_together(linked, prompt):
    oracle = reference(prompt, linked.family)
    asked = asked_for(oracle, 5)
    link = linked.refined(prompt, "query-5+cacheblend-40-onestep")
    masks = blended(oracle, 40, onestep=True, parts="kv", also=asked)
    expected = [masks[0], *[masks[1]] * (oracle.layers - 1)]
    computed = [
        mask & prompt.cached
        for mask in layer_masks(link.plan, oracle.layers, link.refinement.dropped)
    ]
    np.testing.assert_array_equal(computed, expected)
    assert difference_from(linked.follow(link, max_tokens=4), oracle, expected) < TOLERANCE


@pytest.mark.parametrize(("lengths", "fresh"), [((1, 1), 0), ((31, 40), 0), ((62,), 1)])
def test_the_question_may_be_a_chunks_end(linked, lengths, fresh):
    prompt = linked_prompt(*lengths, fresh=fresh, header=2, seed=13)
    linked.cache(prompt)
    oracle = reference(prompt, linked.family)
    link = linked.refined(prompt, "query-30")
    output = linked.follow(link, max_tokens=4)
    assert (
        difference_from(output, oracle, [asked_for(oracle, 30)] * oracle.layers)
        < MORE_STEPS_TOLERANCE
    )


def test_other_choices_find_the_repaired_kv(linked, prompt):
    link = linked.refined(prompt, "query-20")
    oracle = reference(prompt, linked.family)
    for transfer in (link.transfer, link.transfer, link.transfer_again):
        name = linked.add(prompt.tokens.tolist(), transfer, link.salt("a"))
        output = linked.run()[name]
        assert (
            difference_from(output, oracle, [asked_for(oracle, 20)] * oracle.layers)
            < MORE_STEPS_TOLERANCE
        )


@pytest.mark.parametrize("lengths", [(1,), (1, 1), (64, 1), (31, 40)])
def test_cacheblend_where_a_prompt_ends_in_a_chunk(linked, lengths):
    prompt = linked_prompt(*lengths, fresh=0, header=2, seed=12)
    linked.cache(prompt)
    oracle = reference(prompt, linked.family)
    (everything, kept) = blended(oracle, 40, onestep=True)
    kept[-1] = True
    output = linked.follow(linked.refined(prompt, "cacheblend-40-onestep"), max_tokens=4)
    assert (
        difference_from(output, oracle, [everything, *[kept] * (oracle.layers - 1)])
        < MORE_STEPS_TOLERANCE
    )


@pytest.mark.runner_v2
def test_the_oracle_can_fail(linked, prompt):
    output = linked.answer(prompt, "naive")
    assert difference(output, prompt, "legolink-64", linked.family) > 100 * TOLERANCE


@pytest.mark.runner_v2
def test_many_requests_at_once(linked, prompt):
    """Prefills in pieces, links in slices and decoding, all in the same steps."""
    prompts = [
        prompt,
        linked_prompt(*UNALIGNED[::-1], header=2),
        linked_prompt(33, 97, fresh=300, seed=3),
    ]
    for other in prompts[1:]:
        linked.cache(other)
    names = {
        linked.submit(each, policy, salt=secrets.token_hex(4), max_tokens=9): (each, policy)
        for each in prompts
        for policy in ("full", "naive", "legolink-16", "random-30")
    }
    outputs = linked.run()
    for name, (each, policy) in names.items():
        assert difference(outputs[name], each, policy, linked.family) < MORE_STEPS_TOLERANCE, policy


def test_chunks_behind_a_prefix(linked):
    """A generation context stands before them; the first one is exact where it stands."""
    header = random_tokens(7, 5)
    chunks = [Chunk(random_tokens(length, [8, length]), prefix=header) for length in (70, 41, 55)]
    prompt = Prompt(
        (FreshSegment(header), *map(CachedSegment, chunks), FreshSegment(random_tokens(5, 6)))
    )
    linked.cache(prompt)
    for policy in ("naive", "legolink-8", "prefix"):
        assert difference(linked.answer(prompt, policy), prompt, policy, linked.family) < TOLERANCE


@pytest.mark.runner_v2
def test_sensitivity_is_the_distance_of_a_chunk_behind_another_text(linked):
    """Measured in one request, in slices beside a neighbour that decodes, as two requests of their
    own tell."""
    prefix, unrelated, chunk = random_tokens(5, 1), random_tokens(11, 2), random_tokens(300, 3)

    def captured(*before, measured=0):
        key, begin = secrets.token_hex(32), sum(map(len, before))
        tokens = [*chain(*before), *chunk]
        linked.add(random_tokens(30, 4), max_tokens=60)
        transfer = plan_capture(key, begin=begin, end=len(tokens), unrelated=measured)
        assert asyncio.run(linked.run_transfer(transfer, tokens)).linked
        return linked.stored(key)

    alone, behind = captured(prefix), captured(prefix, unrelated)
    both = captured(prefix, unrelated, measured=len(unrelated))
    assert alone.scores.sensitivity is None
    for one, other in zip(both.layers, alone.layers, strict=True):
        torch.testing.assert_close(
            (one.key, one.value), (other.key, other.value), atol=1e-5, rtol=1e-5
        )
    np.testing.assert_allclose(both.scores.received, alone.scores.received, rtol=1e-5)
    np.testing.assert_allclose(both.scores.sensitivity, sensitivity(alone, behind), rtol=1e-3)


def test_a_prompt_may_end_in_a_chunk(linked):
    for lengths in ((1,), (1, 1), (64, 1), (31, 40)):
        prompt = linked_prompt(*lengths, fresh=0, header=2, seed=11)
        linked.cache(prompt)
        for policy in ("naive", "legolink-3", "attnlink-4"):
            output = linked.answer(prompt, policy)
            assert difference(output, prompt, policy, linked.family) < MORE_STEPS_TOLERANCE


@pytest.mark.runner_v2
def test_what_vllm_has_is_not_linked_again(linked, prompt):
    """The second request finds the first one's blocks, which its own salt guards; a third one,
    which asks another question, those of the chunks."""
    salt = secrets.token_hex(4)
    first, second = (linked.answer(prompt, "legolink-16", salt=salt) for _ in range(2))
    longer = Prompt((*prompt.segments[:-1], FreshSegment(random_tokens(40, 77))))
    third = linked.answer(longer, "legolink-16", salt=salt)
    for output, own in ((first, prompt), (second, prompt), (third, longer)):
        assert difference(output, own, "legolink-16", linked.family) < TOLERANCE
    assert outcome_of(first).found == 0
    chunks_end = transfer_for(prompt, "legolink-16").linked
    assert all(chunks_end - 32 < outcome_of(output).found for output in (second, third))


def test_choices_that_begin_with_the_first_ones_first_token_find_its_blocks(
    linked, prompt, monkeypatch
):
    """But for the last block, which is not full; the first choice still decodes then."""
    found = {}
    matched = linked.linking.match

    def noted(request_id, local, tokens):
        found[request_id] = local
        return matched(request_id, local, tokens)

    monkeypatch.setattr(linked.linking, "match", noted)
    salt = secrets.token_hex(4)
    first = linked.submit(prompt, "legolink-16", salt=salt, max_tokens=30)
    while not linked.generated(first):
        linked.step()
    found.clear()
    others = [linked.submit(prompt, "legolink-16", salt=salt) for _ in range(3)]
    outputs = linked.run()
    for name in (first, *others):
        assert (
            difference(outputs[name], prompt, "legolink-16", linked.family) < MORE_STEPS_TOLERANCE
        )
    transfer = transfer_for(prompt, "legolink-16")
    assert len(found) == 3
    assert all(transfer.linked - 32 < local for local in found.values())


def test_a_prompt_that_shares_only_its_beginning(linked, prompt):
    salt = secrets.token_hex(4)
    linked.answer(prompt, "legolink-16", salt=salt)
    chunks = [segment for segment in prompt.segments if isinstance(segment, CachedSegment)]
    other = Prompt(
        (*prompt.segments[:5], FreshSegment((9,) * 40), chunks[-1], *prompt.segments[-1:])
    )
    output = linked.answer(other, "legolink-16", salt=salt)
    assert difference(output, other, "legolink-16", linked.family) < TOLERANCE
