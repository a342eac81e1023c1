"""Steps of the gated delta rule by native code are those of the model's own function."""

import pytest
import torch
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from kvlinker.engines.embedded.model.states.delta_step import NORMED, delta_step
from kvlinker.engines.embedded.model.states.known import RULES
from kvlinker.engines.embedded.model.states.rules import RuleCall
from tests.engines.embedded.native_targets import HERE

pytestmark = pytest.mark.skipif(not HERE, reason="no native code for this CPU")
CPU = torch.device("cpu")


def call(normed, dtype, sequences=3, heads=2, rows=20, columns=48):
    generator = torch.Generator().manual_seed(sequences)
    arguments = {
        name: torch.randn(sequences, 1, heads, size, generator=generator).to(dtype)
        for name, size in (("query", rows), ("key", rows), ("value", columns))
    }
    arguments["g"] = -torch.rand(sequences, 1, heads, generator=generator)
    arguments["beta"] = torch.rand(sequences, 1, heads, generator=generator).to(dtype)
    states = torch.randn(sequences, heads, rows, columns, generator=generator)
    return RuleCall(RULES[0], torch_chunk_gated_delta_rule, arguments | {NORMED: normed}), states


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("sequences", [1, 5, 40])
def test_steps_are_the_models_own(normed, sequences):
    given, states = call(normed, torch.float32, sequences)
    step = delta_step(given, states.shape[1:], CPU)
    before = states.clone()
    assert step is not None
    output, after = step(given.mixed, given.gates, list(states))
    expected, last = given.scan(given.mixed, given.gates, states)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(after), last, atol=2e-5, rtol=1e-5)
    assert torch.equal(states, before)


def test_inputs_in_bf16_are_computed_in_fp32():
    given, states = call(True, torch.bfloat16)
    step = delta_step(given, states.shape[1:], CPU)
    assert step is not None
    output, after = step(given.mixed, given.gates, list(states))
    expected, last = given.scan(given.mixed, given.gates, states)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=0, rtol=0.01)
    torch.testing.assert_close(torch.stack(after), last, atol=2e-5, rtol=1e-5)


def test_other_shapes_and_rules_are_left_to_the_model():
    given, states = call(True, torch.float32, columns=24)
    assert delta_step(given, states.shape[1:], CPU) is None
    other = RuleCall(RULES[-1], given.function, given.arguments)
    assert delta_step(other, (2, 20, 48), CPU) is None
