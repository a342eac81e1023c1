"""Models with windows are linked while vLLM keeps no more of them than the last window."""

import secrets

import numpy as np
import pytest

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt, random_tokens

from kvlinker.linking.plan import layer_masks
from kvlinker.prompting.segments import Prompt
from kvlinker_vllm.scheduler import transfer_scheduler
from vllm_tests.linked_vllm import (
    LinkedVLLM,
    difference,
    difference_from,
    outcome_of,
    reference,
    transfer_for,
)
from vllm_tests.test_exactness import asked_for
from vllm_tests.test_faults import forget

TOLERANCE = 2e-5
LENGTHS = (97, 156, 130, 61)
POLICIES = ["full", "naive", "legolink-16", "random-30", "random-90", "prefix"]
BLOCKS = 160
GARBAGE = 50.0


@pytest.fixture(scope="module", params=["gemma3", "mistral-window"])
def linked(request, tmp_path_factory):
    """Windows in most layers, and in all."""
    folder = tmp_path_factory.mktemp(request.param)
    made = LinkedVLLM(
        request.param, folder / "models", folder / "state", num_gpu_blocks_override=BLOCKS
    )
    for cache in made.runner.kv_caches:
        cache.fill_(GARBAGE)  # whatever is read of blocks that nobody has written is noticed
    yield made
    made.settle()
    assert pool(made).get_num_free_blocks() == BLOCKS - 1
    made.close()


def pool(linked):
    return linked.scheduler.kv_cache_manager.block_pool


@pytest.fixture(scope="module")
def prompt(linked):
    prompt = linked_prompt(*LENGTHS, header=5, middle=3)
    linked.cache(prompt)
    return prompt


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_equals_the_oracle(linked, prompt, policy):
    output = linked.answer(prompt, policy)
    assert outcome_of(output).linked
    assert difference(output, prompt, policy, linked.family) < TOLERANCE


def test_vllm_keeps_the_last_window_alone(linked, prompt):
    """While a request decodes, what it borrowed to be linked has been given back."""
    name = linked.submit(prompt, "legolink-16", max_tokens=30)
    used = []
    while linked.step() == {}:
        if name and linked.scheduler.requests and linked.generated(name) > 2:
            used.append(BLOCKS - 1 - pool(linked).get_num_free_blocks())
    groups = linked.scheduler.kv_cache_config.kv_cache_groups
    windows = [getattr(group.kv_cache_spec, "sliding_window", None) for group in groups]
    assert any(windows)
    whole = -(-(len(prompt) + 30) // 32)
    most = sum(whole if window is None else -(-window // 32) + 1 for window in windows)
    assert used
    assert max(used) <= most < len(groups) * whole


@pytest.mark.parametrize("policy", ["query-10", "query-10+legolink-4", "cacheblend-40-onestep"])
def test_policies_that_look_at_a_first_pass(linked, prompt, policy):
    link = linked.refined(prompt, policy)
    output = linked.follow(link, max_tokens=4)
    assert outcome_of(output).linked
    oracle = reference(prompt, linked.family)
    if policy == "query-10":
        np.testing.assert_array_equal(link.plan.selections[0], asked_for(oracle, 10))
    selected = [np.asarray(mask) & prompt.cached for mask in masks(link, oracle.layers)]
    assert difference_from(output, oracle, selected) < TOLERANCE


def masks(link, layers):
    """What a refined link computes in each layer."""
    refinement = link.refinement
    dropped = refinement.dropped if refinement is not None else ()
    return layer_masks(link.plan, layers, dropped)


def test_many_requests_at_once(linked, prompt):
    prompts = [prompt, linked_prompt(33, 97, fresh=300, seed=3)]
    linked.cache(prompts[1])
    names = {
        linked.submit(each, policy, salt=secrets.token_hex(4), max_tokens=9): (each, policy)
        for each in prompts
        for policy in ("full", "naive", "legolink-16", "random-30")
    }
    outputs = linked.run()
    for name, (each, policy) in names.items():
        assert difference(outputs[name], each, policy, linked.family) < 2 * TOLERANCE, policy


def test_a_prompt_that_shares_its_beginning_sees_through_the_shared_windows(linked, prompt):
    """vLLM has blocks of the first chunks; what is computed right behind them has windows there."""
    salt = secrets.token_hex(4)
    other = Prompt((*prompt.segments, *linked_prompt(97, 61, header=2).segments))
    linked.cache(other)
    linked.answer(prompt, "legolink-16", salt=salt)
    first = transfer_for(prompt, "legolink-16").linked
    plan = transfer_for(other, "legolink-16")
    name = linked.add(other.tokens.tolist(), plan, f"{salt} {transfer_for(prompt, 'legolink-16')}")
    with linked.local_hits() as found:
        output = linked.run()[name]
    assert 0 < found[0] <= first + 32
    assert outcome_of(output).linked
    assert difference(output, other, "legolink-16", linked.family) < TOLERANCE


@pytest.mark.parametrize(("spare", "others"), [(3, 3), (-1, 0)])
def test_few_blocks_make_requests_wait_and_too_few_compute_in_full(
    linked, prompt, spare, others, monkeypatch
):
    """All but a few blocks are somebody else's: one request at a time has room, or none."""
    if not others:
        monkeypatch.setattr(transfer_scheduler, "MOST_SECONDS_WITHOUT_BLOCKS", 0.1)
    groups = len(linked.scheduler.kv_cache_config.kv_cache_groups)
    room = groups * -(-len(prompt) // 32) + spare
    taken = pool(linked).get_new_blocks(pool(linked).get_num_free_blocks() - room)
    try:
        names = [
            linked.submit(prompt, "random-90", salt=secrets.token_hex(4)) for _ in range(1 + others)
        ]
        outputs = linked.run()
    finally:
        pool(linked).free_blocks(taken)
    for name in names:
        assert outcome_of(outputs[name]).linked == (spare > 0)
        policy = "random-90" if spare > 0 else "full"
        assert difference(outputs[name], prompt, policy, linked.family) < TOLERANCE


def test_lost_chunks_mean_a_full_computation(linked):
    """Of the request alone: vLLM takes no word of single blocks where it has groups of them."""
    prompt = linked_prompt(40, 55, header=4, seed=21)
    linked.cache(prompt)
    forget(linked)
    linked.chunk_file(prompt.chunks[0]).write_bytes(b"damaged")
    names = [linked.submit(prompt, "legolink-9"), linked.submit(prompt, "full")]
    outputs = linked.run()
    assert not outcome_of(outputs[names[0]]).linked
    for name in names:
        assert difference(outputs[name], prompt, "full", linked.family) < TOLERANCE


def test_an_aborted_request_leaves_nothing(linked, prompt):
    linked.add(list(random_tokens(30, 4)), max_tokens=60)
    name = linked.submit(prompt, "random-90", salt=secrets.token_hex(4))
    linked.step()
    linked.step()
    linked.abort(name)
    linked.run()
    linked.settle()
    assert pool(linked).get_num_free_blocks() == BLOCKS - 1
