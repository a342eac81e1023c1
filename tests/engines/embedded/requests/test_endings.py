"""What ends an answer, and what is told of its prompt, in the engine."""

import numpy as np
import pytest
import torch

from kvlinker.base.errors import InvalidRequestError
from kvlinker.engines.embedded.model.interception import attention_of
from tests.engines.embedded.conftest import linked_prompt
from tests.toy_models import VOCABULARY, loaded_model

EOS = 257


def prompt_logprobs_of_the_model(prompt):
    """Log probabilities of the prompt's tokens but the first, by the model's own forward pass:
    [tokens - 1]."""
    loaded = loaded_model("llama")
    ids = torch.from_numpy(prompt.tokens)[None]
    with attention_of(loaded.model, "eager"), torch.inference_mode():
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].numpy()


def test_stop_tokens_end_the_answer_and_are_no_part_of_it(bench):
    made = bench()
    prompt = linked_prompt(20)
    plain = made.answer(prompt, max_tokens=8)
    ending = plain.tokens[3]
    stopped = made.answer(prompt, max_tokens=8, stop_token_ids=(ending,))
    first = plain.tokens.index(ending)
    assert stopped.finished.reason == "stop"
    assert stopped.tokens == plain.tokens[: first + 1]
    assert stopped.text == made.answer(prompt, max_tokens=first or 1).text[: len(stopped.text)]


def test_an_answer_has_its_least_length_although_its_model_would_end_it(bench):
    made = bench()
    prompt = linked_prompt(20)
    always_end = {"logit_bias": {EOS: 100}, "ignore_eos": False, "max_tokens": 8}
    assert made.answer(prompt, **always_end).tokens == [EOS]
    longer = made.answer(prompt, min_tokens=5, **always_end)
    assert len(longer.tokens) == 6
    assert longer.tokens.index(EOS) == 5
    assert longer.finished.reason == "stop"


def test_stop_texts_count_behind_the_least_length_only(bench):
    made = bench()
    prompt = linked_prompt(20)
    text = made.answer(prompt, max_tokens=8).text
    assert made.answer(prompt, max_tokens=8, stop=(text[0],)).text == ""
    assert made.answer(prompt, max_tokens=8, stop=(text[0],), min_tokens=4).text.startswith(text[0])


@pytest.mark.parametrize("name", ["stop_token_ids", "logit_bias"])
def test_tokens_that_the_model_lacks_are_refused(bench, name):
    value = {"stop_token_ids": (VOCABULARY,), "logit_bias": {VOCABULARY: 1.0}}[name]
    with pytest.raises(InvalidRequestError, match="not in the model's vocabulary") as caught:
        bench().answer(linked_prompt(20), **{name: value})
    assert caught.value.param == name


def test_prompt_logprobs_are_the_models(bench):
    made = bench(prefix_cache="on", max_step_tokens=17)
    prompt = linked_prompt(fresh=40)
    made.answer(prompt)  # what it leaves must not be reused: it was computed without
    outcome = made.answer(prompt, prompt_logprobs=2, max_tokens=3)
    scored = outcome.finished.prompt_logprobs
    np.testing.assert_allclose(scored.logprobs, prompt_logprobs_of_the_model(prompt), atol=2e-5)
    assert scored.token_ids.tolist() == prompt.tokens[1:].tolist()
    assert scored.top_ids.shape == (39, 2)
    assert len(outcome.tokens) == 3
    assert outcome.tokens == made.answer(prompt, max_tokens=3).tokens


def test_all_choices_tell_the_prompt_logprobs_behind_the_last_chunk(bench):
    prompt = linked_prompt(20, fresh=11)
    expected = prompt_logprobs_of_the_model(prompt)[-10:]
    outcomes, _ = bench().submit_choices(prompt, 2, policy="full", prompt_logprobs=0, max_tokens=2)
    for outcome in outcomes:
        np.testing.assert_allclose(
            outcome.wait().finished.prompt_logprobs.logprobs, expected, atol=2e-5
        )


def test_a_prompt_alone_is_scored_without_an_answer(bench):
    outcome = bench().answer(linked_prompt(fresh=9), prompt_logprobs=0, max_tokens=0)
    assert (outcome.tokens, outcome.finished.reason) == ([], "length")
    assert len(outcome.finished.prompt_logprobs.logprobs) == 8
    assert outcome.finished.usage.output_tokens == 0


def test_answers_have_the_length_that_the_server_allows(bench):
    made = bench(max_answer_tokens=5)
    assert len(made.answer(linked_prompt(20), max_tokens=None).tokens) == 5
    with pytest.raises(InvalidRequestError, match="at most 5") as caught:
        made.answer(linked_prompt(20), max_tokens=6)
    assert caught.value.param == "max_tokens"
