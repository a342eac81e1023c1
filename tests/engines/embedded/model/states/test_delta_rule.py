"""The gated delta rule by native code is the model's own function."""

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from kvlinker.engines.embedded.model.states.delta_rule import NORMED, delta_rule
from kvlinker.engines.embedded.model.states.known import RULES
from kvlinker.engines.embedded.model.states.rules import RuleCall
from tests.engines.native.native_targets import HERE

pytestmark = pytest.mark.skipif(not HERE, reason="no native code for this CPU")
CPU = torch.device("cpu")
FUNCTIONS = {
    rule.function: (rule, function)
    for rule, function in zip(
        RULES, (torch_chunk_gated_delta_rule, chunk_kimi_delta_attention), strict=False
    )
}


def call(
    normed,
    dtype=torch.float32,
    sequences=3,
    tokens=1,
    heads=2,
    rows=20,
    columns=48,
    function="torch_chunk_gated_delta_rule",
):
    generator = torch.Generator().manual_seed(sequences + tokens)
    shape = sequences, tokens, heads
    arguments = {
        name: torch.randn(*shape, size, generator=generator).to(dtype)
        for name, size in (("query", rows), ("key", rows), ("value", columns))
    }
    if not normed:
        arguments["key"] /= rows**0.5
    decays = (rows,) if "kimi" in function else ()
    arguments["g"] = -0.1 * torch.rand(*shape, *decays, generator=generator)
    arguments["beta"] = torch.rand(*shape, generator=generator).to(dtype)
    states = torch.randn(sequences, heads, rows, columns, generator=generator)
    rule, own = FUNCTIONS[function]
    return RuleCall(rule, own, arguments | {NORMED: normed}), states


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("sequences", "tokens", "rows", "columns"),
    [(1, 1, 20, 48), (5, 1, 20, 64), (40, 1, 21, 144), (1, 3, 7, 16), (3, 70, 20, 80)],
)
def test_tokens_are_computed_as_the_model_does(function, normed, sequences, tokens, rows, columns):
    given, states = call(
        normed,
        sequences=sequences,
        tokens=tokens,
        rows=rows,
        columns=columns,
        function=function,
    )
    rule = delta_rule(given, states.shape[1:], CPU)
    before = states.clone()
    assert rule is not None
    output, after = rule(given.mixed, given.gates, list(states))
    expected, last = given.scan(given.mixed, given.gates, states)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(torch.stack(after), last, atol=2e-5, rtol=1e-5)
    assert torch.equal(states, before)


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("rows", [20, 32])
def test_a_call_that_is_taken_over_has_the_same_output_states_and_maps(function, rows):
    """Factors of maps have as many columns as rows: those that native code does not compute are
    the model's own."""
    given, states = call(True, tokens=37, rows=rows, columns=32, sequences=1, function=function)
    rule = delta_rule(given, states.shape[1:], CPU)
    assert rule is not None
    taken = rule.taking_over(given)
    for state in (states, None):
        found = taken.scan(taken.mixed, taken.gates, state)
        expected = given.scan(given.mixed, given.gates, state)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)
    first = given.effect(given.mixed, given.gates, None)
    for behind in (None, first):
        effects = [each.effect(each.mixed, each.gates, behind) for each in (taken, given)]
        for ours, theirs in zip(*effects, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_fewer_heads_of_keys_are_left_to_the_model():
    given, states = call(True, tokens=3)
    rule = delta_rule(given, states.shape[1:], CPU)
    assert rule is not None
    asked = []

    def own(**arguments):
        asked.append(arguments["key"].shape[2])
        return arguments["value"], states

    taken = rule.taking_over(RuleCall(given.rule, own, given.arguments))
    query, key, value = taken.mixed
    taken.scan((query[:, :, :1], key[:, :, :1], value), taken.gates, states)
    assert asked == [1]
    for name in ("query", "key"):
        given.arguments[name] = given.arguments[name][:, :, :1]
    assert delta_rule(given, states.shape[1:], CPU) is None


def test_inputs_in_bf16_are_computed_in_fp32():
    given, states = call(True, torch.bfloat16, tokens=9)
    rule = delta_rule(given, states.shape[1:], CPU)
    assert rule is not None
    output, after = rule(given.mixed, given.gates, list(states))
    expected, last = given.scan(given.mixed, given.gates, states)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output, expected, atol=1e-3, rtol=0.01)
    torch.testing.assert_close(torch.stack(after), last, atol=2e-5, rtol=1e-5)


def test_other_shapes_and_rules_are_left_to_the_model():
    given, states = call(True, columns=24)
    assert delta_rule(given, states.shape[1:], CPU) is None
    other = RuleCall(RULES[-1], given.function, given.arguments)
    assert delta_rule(other, (2, 20, 48), CPU) is None
