"""Numbers that overflow, and KV that is not what it should be, harm no other request."""

from dataclasses import replace

import pytest
import torch

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store.chunk_kv import ChunkKV, LayerKV, changed
from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.toy_models import loaded_model

BAD = 2
"""A token whose numbers overflow, which no random text has."""


@pytest.fixture
def overflowing():
    """A model that one token makes overflow, with embeddings as they were afterwards."""
    loaded = loaded_model("llama")

    def spoil(module, inputs, output):
        output = output.clone()
        output[inputs[0] == BAD] = float("inf")
        return output

    hook = loaded.model.get_input_embeddings().register_forward_hook(spoil)
    yield loaded
    hook.remove()


def with_last_but_one(prompt, token):
    prompt.tokens[-2] = token
    return prompt


def test_what_fails_spoils_no_beginning_that_others_share(bench, overflowing):
    made = bench(model=overflowing, prefix_cache="on")
    prompt = linked_prompt(fresh=90)
    failed = made.answer(with_last_but_one(linked_prompt(fresh=90), BAD), "full")
    assert "not all finite" in str(failed.failed)
    alike = made.answer(prompt, "full")
    assert alike.finished is not None
    fresh = bench(model=overflowing).answer(prompt, "full")
    torch.testing.assert_close(alike.logprobs, fresh.logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("n", [1, 3])
def test_what_fails_leaves_no_nan_in_slots(bench, overflowing, n):
    made = bench(model=overflowing, prefix_cache="on")
    spoilt = with_last_but_one(linked_prompt(fresh=150), BAD)
    outcomes, _ = made.submit_choices(spoilt, n, "full")
    assert all("not all finite" in str(outcome.wait().failed) for outcome in outcomes)
    made.settle()
    for layer in made.engine.runner.pool.layers:
        assert all(bool(part.isfinite().all()) for part in layer.parts)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_who_shares_a_step_with_what_fails_goes_on(bench, overflowing, order):
    """Of the requests in a step, some attend to more segments than others."""
    made = bench(model=overflowing, max_step_tokens=512)
    healthy = linked_prompt(40, 21, header=3, seed=5), linked_prompt(30, seed=6)
    spoilt = with_last_but_one(linked_prompt(fresh=20, seed=8), BAD)
    prompts = [healthy[0], healthy[1], spoilt]
    for prompt in healthy:
        made.cache(prompt)
    expected = [made.answer(prompt, "legolink-4").logprobs for prompt in healthy]
    with made.held():
        outcomes = {index: made.submit(prompts[index])[0] for index in order}
    assert "not all finite" in str(outcomes[2].wait().failed)
    for index in (0, 1):
        found = outcomes[index].wait()
        assert found.failed is None
        torch.testing.assert_close(found.logprobs, expected[index], atol=2e-5, rtol=0)


def test_a_chunk_that_overflows_is_not_stored(bench, overflowing):
    made = bench(model=overflowing)
    chunk = Chunk((*random_tokens(39, 0), BAD))
    with pytest.raises(KVLinkerError, match="not all finite: layer 0 holds NaN"):
        made.engine.cache_chunk(chunk, tenant="default").result(timeout=60)
    key = chunk_key(chunk, fingerprint=overflowing.fingerprint, tenant="default")
    assert made.store.get_resident(key) is None


@pytest.mark.parametrize("change", ["tokens", "layers", "heads"])
def test_kv_of_another_shape_is_computed_anew(bench, caplog, change):
    caplog.set_level("ERROR")
    made, prompt = bench(), linked_prompt(40, 30)
    made.cache(prompt)
    expected = made.answer(prompt, "naive")
    chunk = prompt.chunks[0]
    key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    kv = made.store.get_resident(key)
    layers = {
        "tokens": [LayerKV(each.key[:, :-1], each.value[:, :-1]) for each in kv.layers],
        "layers": kv.layers[:-1],
        "heads": [LayerKV(each.key[:1], each.value[:1]) for each in kv.layers],
    }[change]
    made.store.delete(key)
    made.store.put(key, ChunkKV(tuple(layers), kv.scores))
    found = made.answer(prompt, "naive")
    assert found.logprobs == expected.logprobs
    assert key in caplog.text
    assert made.store.get_resident(key).layers[-1].key.shape == kv.layers[-1].key.shape


@pytest.mark.parametrize("change", ["layers", "tokens", "inner tokens"])
@pytest.mark.parametrize("family", ["qwen3_5-states", "mamba2-alone"])
def test_states_of_another_shape_are_computed_anew(bench, caplog, family, change):
    """Whoever shared the step failed with them, or they were taken for other tokens'."""
    caplog.set_level("ERROR")
    made, prompt = bench(family), linked_prompt(50, 41, header=3)
    made.cache(prompt)
    expected = made.answer(prompt, "random-40")
    key = chunk_key(prompt.chunks[0], fingerprint=made.loaded.fingerprint, tenant="default")
    kv = made.store.get(key)
    states = {
        "layers": kv.states[:-1],
        "tokens": [
            replace(each, mixed=each.mixed[:-1], gates=tuple(gate[:-1] for gate in each.gates))
            for each in kv.states
        ],
        "inner tokens": [replace(each, inner=()) for each in kv.states],
    }[change]
    made.store.delete(key)
    made.store.put(key, replace(kv, states=tuple(states)))
    found = made.answer(prompt, "random-40")
    torch.testing.assert_close(found.logprobs, expected.logprobs, atol=2e-5, rtol=0)
    assert key in caplog.text


def test_an_indexers_data_of_another_shape_are_computed_anew(bench, caplog):
    caplog.set_level("ERROR")
    made, prompt = bench("deepseek_v32-picks"), linked_prompt(50, 41, header=3)
    made.cache(prompt)
    expected = made.answer(prompt, "naive")
    key = chunk_key(prompt.chunks[0], fingerprint=made.loaded.fingerprint, tenant="default")
    kv = made.store.get(key)
    made.store.delete(key)
    made.store.put(key, changed(kv, lambda _, layer: LayerKV(layer.key, layer.value)))
    assert made.answer(prompt, "naive").logprobs == expected.logprobs
    assert key in caplog.text
