"""The strong oracle: with chunk KV taken from the prompt's own full forward pass, and garbage wherever a policy
recomputes, every policy must give exactly what the model gives."""

import numpy as np
import pytest
import torch

from kvlinker.chunks import chunk_key
from kvlinker.engine.batch import Batch, Capture, Run
from kvlinker.engine.link_loading import PromptEvidence
from kvlinker.engine.observation import ScoreCollector
from kvlinker.engine.pool import KVPool
from kvlinker.engine.runner import Runner
from kvlinker.linking import make_plan, parse_policy
from kvlinker.store import ChunkKV, LayerKV
from tests.engine.conftest import full_forward, linked_prompt
from tests.toy_models import FAMILIES, loaded_model

POLICIES = ["full", "naive", "prefix", "legolink-1", "legolink-16", "attnlink-9", "random-40", "random-100"]
STEPS = 4
TOLERANCE = 2e-5


def true_chunk_kv(loaded, prompt, names=None, step=10**6):
    """Each chunk's KV as the full forward pass of this very prompt makes it, ``step`` tokens at a time. With ``names``
    of the chunks, their scores are collected too."""
    spans = [(span.start, span.end) for span in prompt.spans]
    scores = None if names is None else ScoreCollector(len(loaded.layers), spans, names)
    capture = Capture(loaded.layers, spans, dtype=loaded.dtype, scores=scores)
    pool = KVPool(loaded.layers, len(prompt), dtype=loaded.dtype, device=loaded.device)
    runner = Runner(loaded.model, loaded.layers, pool)
    for begin in range(0, len(prompt), step):
        runner.step(Batch((Run(0, begin, prompt.tokens[begin : begin + step], capture=capture, observer=scores),)))
    return capture.finish()


def with_garbage(kv, positions):
    """The KV with garbage at the given tokens of the chunk."""

    def spoiled(tensor):
        spoiled = tensor.clone()
        spoiled[:, positions] = 77.0
        return spoiled

    return ChunkKV(tuple(LayerKV(spoiled(layer.key), spoiled(layer.value)) for layer in kv.layers))


def plant(bench, prompt, policy, tenant):
    """Store the true KV under the chunks' keys, garbage at what the policy recomputes."""
    selected = parse_policy(policy).select(prompt, PromptEvidence())
    chunks_kv = true_chunk_kv(bench.loaded, prompt)
    for chunk, span, kv in zip(prompt.chunks, prompt.spans, chunks_kv, strict=True):
        positions = np.flatnonzero(selected[span.start : span.end]).tolist()
        key = chunk_key(chunk, fingerprint=bench.loaded.fingerprint, tenant=tenant)
        bench.store.put(key, with_garbage(kv, positions))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_equals_the_full_forward_pass(bench, family):
    made = bench(family, max_step_tokens=37, kv_slots=8192)
    prompt = linked_prompt(31, 57, 19, 64, header=5, middle=3)
    tokens, logprobs = full_forward(family, prompt, STEPS)
    outcomes = {}
    for policy in POLICIES:
        plant(made, prompt, policy, tenant=policy)
        outcomes[policy] = made.submit(prompt, policy, tenant=policy, max_tokens=STEPS)[0]
    for policy, outcome in outcomes.items():
        outcome.wait()
        assert outcome.failed is None, outcome.failed
        assert outcome.tokens == tokens, policy
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE, err_msg=policy)
        plan = make_plan(prompt, parse_policy(policy), PromptEvidence())
        assert outcome.finished.usage.recomputed_tokens == plan.recomputed_tokens
        assert outcome.finished.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize("family", ["dynamic-rope", "longrope"])
def test_rotary_embeddings_that_depend_on_length_are_exact_up_to_the_window(bench, family):
    """Their tables change once more positions are asked for than the model was pretrained with: 256 here."""
    made = bench(family, max_step_tokens=37)
    assert made.engine.max_model_len == 256
    prompt = linked_prompt(80, 90, 71, fresh=11)
    tokens, logprobs = full_forward(family, prompt, 4)
    for policy in ("full", "legolink-3", "naive"):
        plant(made, prompt, policy, tenant=policy)
        outcome = made.answer(prompt, policy, tenant=policy, max_tokens=4)
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [(1,), (1, 1), (30, 1), (31, 40)])
def test_a_prompt_may_end_in_a_chunk(bench, policy, lengths):
    made = bench()
    prompt = linked_prompt(*lengths, fresh=0, header=2)
    tokens, logprobs = full_forward("llama", prompt, STEPS)
    plant(made, prompt, policy, tenant="default")
    outcome = made.answer(prompt, policy, max_tokens=STEPS)
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss-sinks"])
def test_garbage_that_is_not_recomputed_shows(bench, family):
    """The oracle can fail: spoil one token that naive keeps, and the answer's probabilities move."""
    made = bench(family)
    prompt = linked_prompt(31, 40)
    _, logprobs = full_forward(family, prompt, 1)
    plant(made, prompt, "legolink-1", tenant="default")
    outcome = made.answer(prompt, "naive", max_tokens=1)
    assert abs(outcome.logprobs[0] - logprobs[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_chunk_alone_is_prefix_caching(bench, family):
    """R = ∅ with one chunk at position 0 must equal prefix caching, here with KV that kvlinker made itself."""
    made = bench(family)
    prompt = linked_prompt(61)
    made.cache(prompt)
    tokens, logprobs = full_forward(family, prompt, STEPS)
    outcome = made.answer(prompt, "naive", max_tokens=STEPS)
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
    assert outcome.finished.usage.cached_tokens == 61


def test_unpositioned_keys_differ_from_positioned_ones(bench):
    made = bench()
    prompt = linked_prompt(31, 40)
    made.cache(prompt)
    naive = made.answer(prompt, "naive")
    stale = made.answer(prompt, "naive-unpositioned")
    assert not np.allclose(naive.logprobs, stale.logprobs, atol=1e-4)


def test_stored_keys_carry_no_position(bench):
    """The same chunk linked twice: its first-layer keys differ between the places, its stored ones do not."""
    made = bench()
    prompt = linked_prompt(20, 20)
    made.cache(prompt)
    key = chunk_key(prompt.chunks[0], fingerprint=made.loaded.fingerprint, tenant="default")
    stored = made.store.get(key).layers[0].key
    moved = true_chunk_kv(made.loaded, linked_prompt(20, header=13))[0].layers[0].key
    torch.testing.assert_close(stored, moved)
    assert loaded_model("llama").layers[0].rotary is not None
