"""What is exact in one thread is exact in two: the work is divided otherwise, but the answers are
the model's.

All other tests compute in one thread.
"""

import numpy as np
import pytest
import torch

from kvlinker.linking import parse_policy
from tests.engines.embedded.conftest import full_forward, linked_prompt
from tests.engines.embedded.execution.test_oracle import (
    EVIDENCE_DRIVEN,
    POLICIES,
    STEPS,
    TOLERANCE,
    plant,
    plant_layer_by_layer,
    usages,
)

CASES = [
    ("llama", 37),
    pytest.param("llama", 4096, marks=pytest.mark.matrix),
    pytest.param("gemma3", 37, marks=pytest.mark.matrix),
    pytest.param("gpt_oss-sinks", 4096, marks=pytest.mark.matrix),
    pytest.param("gpt_oss-sinks", 37, marks=pytest.mark.matrix),
    pytest.param("mixtral-moe", 37, marks=pytest.mark.matrix),
]

pytestmark = pytest.mark.usefixtures("two_threads")


def noted_threads(made):
    """In how many threads each step from now on is computed."""
    threads, step = [], made.engine.runner.step

    def noted(*arguments):
        threads.append(torch.get_num_threads())
        return step(*arguments)

    made.engine.runner.step = noted
    return threads


@pytest.mark.parametrize(("family", "step"), CASES)
def test_every_policy_equals_the_full_forward_pass(bench, family, step):
    made = bench(family, max_step_tokens=step, kv_slots=8192, prefix_cache="on")
    threads = noted_threads(made)
    prompt = linked_prompt(31, 57, 19, 64, header=5, middle=3)
    expected = full_forward(family, prompt, STEPS)
    for policy in POLICIES:
        plant(made, prompt, policy, tenant=policy)
    for policy in EVIDENCE_DRIVEN:
        plant_layer_by_layer(made, prompt, policy)
    for policy, usage in usages(made, prompt, [*POLICIES, *EVIDENCE_DRIVEN], expected):
        assert usage.recomputed_tokens > 0 or not parse_policy(policy).needs.refines
    assert set(threads) == {2}


def test_long_prompts_whose_every_operation_is_divided(bench):
    """PyTorch and our norms leave fewer than 32,768 numbers to one thread."""
    made = bench(max_step_tokens=4096, kv_slots=8192)
    threads = noted_threads(made)
    prompt = linked_prompt(400, 300, 200, header=5, fresh=600)
    tokens, logprobs = full_forward("llama", prompt, 3)
    for policy in ("full", "naive", "legolink-16"):
        plant(made, prompt, policy, tenant=policy)
    for policy in ("full", "naive", "legolink-16"):
        outcome = made.submit(prompt, policy, tenant=policy, max_tokens=3)[0].wait()
        assert outcome.failed is None, outcome.failed
        assert outcome.tokens == tokens, policy
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE, err_msg=policy)
    assert set(threads) == {2}
