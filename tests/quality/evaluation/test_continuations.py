"""Text behind chunks, scored under several policies on a tiny random model."""

from typing import Any

import numpy as np
import pytest
import torch

from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.llm import LLM
from kvlinker.quality.evaluation.evaluate import Journal, evaluate
from kvlinker.quality.evaluation.examiner import Examiner
from kvlinker.quality.evaluation.examples import Example, ExampleAnswer, Scored, Skipped
from kvlinker.settings import load_settings
from tests.quality.evaluation.conftest import WINDOW, make_continuation, make_example, results_of
from tests.toy_models import loaded_model

POLICIES = ("full", "naive", "legolink-4", "cacheblend-40", "random-50")


@pytest.fixture(params=["alone", "bos", "prefix"])
def llm_of_context(request, tmp_path):
    settings = load_settings(
        state_dir=tmp_path,
        kv_slots=512,
        disk_space=0,
        prefix_cache="off",
        generation_context=request.param,
    )
    with LLM.from_model(loaded_model("llama"), settings) as running:
        yield running


def test_full_is_the_models_own_loss_on_the_same_text_behind_bos(llm_of_context):
    """No chat template; in context bos, every chunk begins with it."""
    llm, example = llm_of_context, make_continuation()
    (full,) = results_of(Examiner(llm).examine(example, ("full",)), Scored)
    model = loaded_model("llama").model
    between = "<s>" if llm.settings.generation_context == "bos" else ""
    text = "<s>" + between.join(example.passages) + example.continuation
    ids = torch.tensor([llm.builder.completion(text).tokens.tolist()])
    with attention_of(model, "eager"), torch.inference_mode():
        logprobs = torch.log_softmax(model(input_ids=ids).logits[0], -1)
    scored = len(example.continuation) - 1  # its first character is told by a chunk
    own = logprobs[-scored - 1 : -1].gather(1, ids[0, -scored:, None]).mean()
    assert full.loss == pytest.approx(-float(own), abs=1e-5)
    assert (full.agreement, full.kl, full.recomputed_fraction) == (1, 0, 1)


def test_policies_differ_and_reruns_do_not(llm):
    examiner = Examiner(llm)
    results = results_of(examiner.examine(make_continuation(), POLICIES), Scored)
    assert [result.policy for result in results] == list(POLICIES)
    assert len({result.loss for result in results}) == len(POLICIES)
    assert all(result.kl > 0 for result in results[1:])
    assert 0 < results[2].recomputed_fraction < results[4].recomputed_fraction < 1
    assert results_of(examiner.examine(make_continuation(), POLICIES), Scored) == results


def test_agreement_and_divergence_are_means_over_the_tokens_that_are_scored(llm):
    example = make_continuation(3)
    _, naive = results_of(Examiner(llm).examine(example, ("full", "naive")), Scored)
    parts = ["<s>", *llm.generate_context_cache(example.passages), example.continuation]
    full, other = (llm.score(parts, policy=policy, logprobs=1000) for policy in ("full", "naive"))
    assert naive.agreement == pytest.approx((full.top_ids[:, 0] == other.top_ids[:, 0]).mean())
    by_token = []
    for ids, logprobs, other_ids, other_logprobs in zip(
        full.top_ids, full.top_logprobs, other.top_ids, other.top_logprobs, strict=True
    ):
        p, q = (np.zeros(len(ids)) for _ in range(2))
        p[ids], q[other_ids] = logprobs, other_logprobs
        by_token.append((np.exp(p) * (p - q)).sum())
    assert naive.kl == pytest.approx(np.mean(by_token), rel=1e-3)


def test_what_does_not_fit_or_has_nothing_to_score_is_skipped(llm):
    long = make_continuation(passages=("x" * 200, "y" * 200))
    skipped = Examiner(llm).examine(long, POLICIES)
    assert isinstance(skipped, Skipped)
    assert skipped.where == "prose 0"
    assert f"430 prompt tokens, but the model takes {WINDOW} (--truncate" in skipped.reason
    (truncated,) = results_of(Examiner(llm, truncate=True).examine(long, ("naive",)), Scored)
    assert truncated.cached_tokens == 200
    short = Examiner(llm).examine(make_continuation(continuation="."), POLICIES)
    assert isinstance(short, Skipped)
    assert "nothing to score: 1 tokens" in short.reason


def test_they_are_journaled_beside_answers(llm, tmp_path):
    examples: list[Example] = [make_continuation(), make_example()]
    path = tmp_path / "run.jsonl"
    first = list(evaluate(Examiner(llm), examples, POLICIES, journal=Journal(path, {})))
    for (_, outcome), kind in zip(first, (Scored, ExampleAnswer), strict=True):
        assert len(results_of(outcome, kind)) == len(POLICIES)
    nobody: Any = None
    assert list(evaluate(nobody, examples, POLICIES, journal=Journal(path, {}))) == first
