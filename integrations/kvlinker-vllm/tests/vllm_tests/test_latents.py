"""Models with latent attention in vLLM: what it answers over linked latents is what transformers
answers, and the chunks are those of the embedded engine."""

import secrets

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from tests.doors.http.serving import tiny_settings
from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.engines.embedded.test_policy_references import blended
from tests.toy_models import loaded_model

from kvlinker.base.types.chunks import chunk_key
from kvlinker.linking.plan import layer_masks
from kvlinker.llm import LLM
from kvlinker.store.format.sealing import NOT_SEALED
from kvlinker_vllm.worker.worker_chunks import WorkerChunks
from vllm_tests.conftest import HEAD_DIM
from vllm_tests.linked_vllm import (
    LinkedVLLM,
    difference,
    difference_from,
    key_of,
    outcome_of,
    reference,
)
from vllm_tests.test_exactness import asked_for

FAMILY = "deepseek_v3-latents-interleaved"
TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def linked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    made = LinkedVLLM(
        FAMILY, folder / "models", folder / "state", num_gpu_blocks_override=256, block_size=16
    )
    yield made
    made.settle()
    made.close()


@pytest.fixture(scope="module")
def prompt(linked):
    prompt = linked_prompt(97, 156, 61, header=5, middle=3)
    linked.cache(prompt)
    return prompt


@pytest.mark.parametrize(
    "policy", ["full", "naive", "legolink-16", "random-30", "prefix", "naive-unpositioned"]
)
def test_every_policy_equals_the_oracle(linked, prompt, policy):
    output = linked.answer(prompt, policy)
    assert difference(output, prompt, policy, FAMILY) < TOLERANCE
    assert outcome_of(output).linked


def test_the_oracle_can_fail(linked, prompt):
    output = linked.answer(prompt, "naive")
    assert difference(output, prompt, "legolink-64", FAMILY) > 100 * TOLERANCE


def test_chunks_are_those_of_the_embedded_engine(linked, prompt, tmp_path):
    """Latents and un-rotated keys, one of each for a token, and the scores of absorbed queries."""
    chunk = prompt.chunks[0]
    ours = linked.stored(key_of(chunk))
    with LLM.from_model(loaded_model(FAMILY, head_dim=HEAD_DIM), tiny_settings(tmp_path)) as llm:
        llm.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
        llm.store.flush()
        key = chunk_key(chunk, fingerprint=llm.engine.fingerprint, tenant="default")
    files = WorkerChunks(tmp_path / "chunks", memory_bytes=0, sealing=NOT_SEALED)
    theirs = files.get(key)
    assert theirs is not None
    assert theirs.scores is not None
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert one.key.shape == (1, len(chunk), 64)
        assert one.value.shape == (1, len(chunk), 512)
        torch.testing.assert_close(one.key, other.key, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.value, other.value, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(ours.scores.received, theirs.scores.received, atol=1e-4)
    np.testing.assert_allclose(ours.scores.inter, theirs.scores.inter, atol=1e-4)


def test_policies_that_look_at_scores(linked, prompt):
    evidence = linked.evidence(prompt)
    output = linked.answer(prompt, "h2o-20", evidence=evidence)
    assert difference(output, prompt, "h2o-20", FAMILY, evidence) < TOLERANCE


def test_policies_that_look_at_the_question(linked, prompt):
    """Without a prefix cache, which vLLM's backend for latents on CPUs does not take, the second
    pass places everything again."""
    oracle = reference(prompt, FAMILY)
    link = linked.refined(prompt, "query-10")
    np.testing.assert_array_equal(link.plan.selections[0], asked_for(oracle, 10))
    output = linked.follow(link, max_tokens=4)
    expected = [asked_for(oracle, 10)] * oracle.layers
    assert difference_from(output, oracle, expected) < TOLERANCE
    assert outcome_of(output).linked


def test_policies_that_look_at_deviations(linked, prompt):
    oracle = reference(prompt, FAMILY)
    masks = blended(oracle, 40, onestep=True)
    expected = [masks[0], *[masks[1]] * (oracle.layers - 1)]
    link = linked.refined(prompt, "cacheblend-40-onestep")
    computed = [
        mask & prompt.cached
        for mask in layer_masks(link.plan, oracle.layers, link.refinement.dropped)
    ]
    np.testing.assert_array_equal(computed, expected)
    assert difference_from(linked.follow(link, max_tokens=4), oracle, expected) < TOLERANCE


def test_many_requests_at_once(linked, prompt):
    """Links in slices beside neighbours that decode, and runs of one token beside longer ones."""
    other = linked_prompt(33, 97, fresh=200, seed=3)
    linked.cache(other)
    linked.add(list(random_tokens(30, 4)), max_tokens=40)
    names = {
        linked.submit(each, policy, salt=secrets.token_hex(4), max_tokens=9): (each, policy)
        for each in (prompt, other)
        for policy in ("full", "naive", "legolink-1", "random-30")
    }
    outputs = linked.run()
    for name, (each, policy) in names.items():
        assert difference(outputs[name], each, policy, FAMILY) < TOLERANCE, policy


def test_a_chunk_that_is_gone_is_computed(linked):
    prompt = linked_prompt(40, 50, header=3, seed=21)
    linked.cache(prompt)
    name = linked.submit(prompt, "naive")
    linked.chunk_file(prompt.chunks[0]).unlink()
    output = linked.run()[name]
    assert difference(output, prompt, "full", FAMILY) < TOLERANCE
