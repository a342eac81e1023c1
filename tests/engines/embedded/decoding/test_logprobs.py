"""Log probabilities of given text: against the model's own forward pass, and against linking done
slowly."""

import numpy as np
import pytest
import torch

from kvlinker.base.errors import ContextLengthError, EngineClosedError, InvalidRequestError
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.embedded.decoding import logprobs as collecting
from kvlinker.linking import Evidence, parse_policy
from kvlinker.prompting.segments import FreshSegment, Prompt
from tests.engines.embedded.conftest import EVERY_POLICY, as_policy, linked_prompt, random_tokens
from tests.engines.embedded.reference import Reference, forward, reference_model
from tests.toy_models import VOCABULARY

TOLERANCE = 2e-5
TAIL = 23
"""Tokens behind the last chunk of PROMPT: 3 and 20."""
PROMPT = linked_prompt(31, 22, 19, header=5, middle=3, fresh=20)


def submit(made, prompt, policy, top=None):
    return made.engine.score(
        GenerationRequest(prompt, as_policy(policy), SamplingParams(logprobs=top))
    )


def score(made, prompt, policy, top=None):
    return submit(made, prompt, policy, top).result(timeout=60)


def after(logits, prompt, tail):
    """Log probabilities of what follows the prompt's last ``tail`` tokens, [tail - 1,
    vocabulary]."""
    return torch.log_softmax(logits[len(prompt) - tail : -1].float(), -1).numpy()


def of(distributions, prompt):
    """The prompt's own last tokens' among them."""
    return distributions[np.arange(len(distributions)), prompt.tokens[-len(distributions) :]]


@pytest.mark.parametrize(
    "family", ["llama", "gemma2-softcap", "gpt_oss-sinks", "cohere2-interleaved-nope", "phi3"]
)
@pytest.mark.parametrize("max_step_tokens", [7, 512])
def test_full_is_the_models_own_forward_pass(bench, family, max_step_tokens):
    """Some of these cap or scale their logits."""
    made = bench(family, max_step_tokens=max_step_tokens)
    own = after(forward(reference_model(family), PROMPT.tokens).logits, PROMPT, TAIL)
    found = score(made, PROMPT, "full", top=5)
    assert found.token_ids.tolist() == PROMPT.tokens[1 - TAIL :].tolist()
    np.testing.assert_allclose(found.logprobs, of(own, PROMPT), atol=TOLERANCE)
    assert found.loss == pytest.approx(-of(own, PROMPT).mean(), abs=TOLERANCE)
    assert found.top_ids.tolist() == np.argsort(-own)[:, :5].tolist()
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-own)[:, :5], atol=TOLERANCE)
    assert found.usage.prompt_tokens == len(PROMPT)
    assert found.usage.output_tokens == 0


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss-sinks"])
@pytest.mark.parametrize("policy", ["naive", "legolink-4", "random-30"])
def test_linked_prompts_are_scored_as_linking_done_slowly_scores_them(bench, family, policy):
    reference = Reference(PROMPT, family)
    selected = parse_policy(policy).select(PROMPT, Evidence())
    slowly = of(after(reference.run([selected]).logits, PROMPT, TAIL), PROMPT)
    made = bench(family, max_step_tokens=10)
    found = score(made, PROMPT, policy)
    np.testing.assert_allclose(found.logprobs, slowly, atol=TOLERANCE)
    assert not np.allclose(score(made, PROMPT, "full").logprobs, slowly, atol=100 * TOLERANCE)
    assert found.top_ids.shape == (TAIL - 1, 0)


def test_a_policy_that_refines_is_scored_with_what_it_kept(bench):
    made = bench()
    made.cache(PROMPT)
    reference = Reference(PROMPT)
    explained = made.explain(PROMPT, "cacheblend-40")
    masks = [np.zeros(len(PROMPT), dtype=bool) for _ in range(reference.layers)]
    for entry in explained.layers:
        for begin, end in entry.recomputed:
            for mask in masks[entry.first : entry.last + 1]:
                mask[begin:end] = True
    assert masks[0].sum() > masks[-1].sum() > 0
    slowly = of(after(reference.run(masks).logits, PROMPT, TAIL), PROMPT)
    np.testing.assert_allclose(
        score(made, PROMPT, "cacheblend-40").logprobs, slowly, atol=TOLERANCE
    )


def test_together_is_alone(bench, monkeypatch):
    """Every policy, in batches that also generate, with prompts cut into steps and logits into
    slices."""
    alone = bench(max_step_tokens=512)
    expected = {policy: score(alone, PROMPT, policy).logprobs for policy in EVERY_POLICY}
    monkeypatch.setattr(collecting, "ROWS_AT_ONCE", 4)
    made = bench(max_step_tokens=50)
    answers = [made.submit(PROMPT, "legolink-4", max_tokens=30)[0]]
    futures = {policy: submit(made, PROMPT, policy) for policy in EVERY_POLICY}
    answers.append(made.submit(linked_prompt(40, 9, seed=8), "cacheblend-20")[0])
    for policy, future in futures.items():
        found = future.result(timeout=60).logprobs
        np.testing.assert_allclose(found, expected[policy], atol=TOLERANCE, err_msg=policy)
    assert all(answer.wait().failed is None for answer in answers)


def test_what_a_score_says_of_usage_is_what_a_generation_says(bench):
    made = bench()
    made.cache(PROMPT)
    for policy in EVERY_POLICY:
        usage = made.answer(PROMPT, policy, max_tokens=1).finished.usage
        scored = score(made, PROMPT, policy).usage
        assert (scored.cached_tokens, scored.recomputed_tokens) == (
            usage.cached_tokens,
            usage.recomputed_tokens,
        )


def test_tokens_that_are_scored_whole_are_scored_as_the_model_does(bench):
    """Piece by piece, beside answers that come first; the prompt's chunks play no part."""
    made = bench(max_step_tokens=16)
    answers = [made.submit(PROMPT, "legolink-4", max_tokens=9)[0] for _ in range(2)]
    first = len(PROMPT) - 9
    future = made.engine.score_whole(PROMPT.tokens, first=first, top=5, tenant="default")
    own = after(forward(reference_model("llama"), PROMPT.tokens).logits, PROMPT, 10)
    found = future.result(timeout=60)
    assert found.token_ids.tolist() == PROMPT.tokens[first:].tolist()
    np.testing.assert_allclose(found.logprobs, of(own, PROMPT), atol=TOLERANCE)
    assert found.top_ids.tolist() == np.argsort(-own)[:, :5].tolist()
    assert all(answer.wait().failed is None for answer in answers)


@pytest.mark.parametrize(
    ("length", "first", "error"),
    [(9, 0, InvalidRequestError), (9, 9, InvalidRequestError), (10_000, 5, ContextLengthError)],
)
def test_what_cannot_be_scored_whole_is_refused(bench, length, first, error):
    tokens = np.ones(length, dtype=np.int64)
    with pytest.raises(error):
        bench().engine.score_whole(tokens, first=first, top=5, tenant="default")


@pytest.mark.whole
def test_a_request_that_loses_its_slots_is_scored_again(bench):
    """An answer outgrows its slots while the prompt is computed, token by token."""
    made = bench(kv_slots=190, max_step_tokens=2)
    expected = score(made, PROMPT, "full").logprobs
    made.cache(linked_prompt(30))
    with made.held() as held:
        growing = made.submit(linked_prompt(30), "naive", max_tokens=140)[0]
        held.let(10)
        future = submit(made, PROMPT, "full")
        held.wait_until_ready(2)
    np.testing.assert_allclose(future.result(timeout=60).logprobs, expected, atol=TOLERANCE)
    assert growing.wait().failed is None
    assert made.engine.scheduler.preemptions > 0


def test_text_without_chunks_is_scored_from_its_second_token_up_to_the_window(bench):
    made = bench(max_model_len=64, kv_slots=64)
    prompt = Prompt((FreshSegment(random_tokens(64, 1)),))
    own = of(after(forward(reference_model("llama"), prompt.tokens).logits, prompt, 64), prompt)
    np.testing.assert_allclose(score(made, prompt, "naive").logprobs, own, atol=TOLERANCE)
    with pytest.raises(ContextLengthError, match="65 tokens, but the model takes 64"):
        submit(made, Prompt((FreshSegment(random_tokens(65, 1)),)), "naive")


@pytest.mark.parametrize("fresh", [0, 1])
def test_nothing_to_score_is_said(bench, fresh):
    with pytest.raises(InvalidRequestError, match=f"{fresh} tokens follow the last chunk"):
        submit(bench(), linked_prompt(9, fresh=fresh), "naive")


def test_more_alternatives_than_tokens_are_all_tokens(bench):
    found = score(bench(), linked_prompt(9, fresh=3), "naive", top=1000)
    assert found.top_ids.shape == (2, VOCABULARY)
    np.testing.assert_allclose(np.exp(found.top_logprobs).sum(axis=1), 1, atol=1e-5)


def test_a_score_under_way_ends_when_the_engine_closes(bench):
    made = bench(max_step_tokens=1)
    future = submit(made, linked_prompt(fresh=900), "full")
    made.engine.close()
    with pytest.raises(EngineClosedError):
        future.result(timeout=60)
