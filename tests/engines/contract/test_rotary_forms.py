"""Functions of every form rotate alike once their form is read."""

import pytest
import torch

from kvlinker.engines.contract.rotary_forms import RotaryForm
from tests.engines.embedded.toy_rotary import Angles, interleaved

HEADS = torch.randn(1, 3, 5, 8, generator=torch.Generator().manual_seed(0))
COS, SIN = Angles(8, repeat="interleaved")(HEADS, torch.arange(5)[None])


def both(q, k, cos, sin, unsqueeze_dim=1):
    return interleaved(q, k, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim))


def one(x, cos, sin, unsqueeze_dim=1):
    return both(x, x, cos, sin, unsqueeze_dim)[0]


def one_of_tokens_first(tensor, sin, cos):
    return one(tensor, cos, sin, 2)


def keys_are_optional(q, k=None, cos=None, sin=None):
    return one(q, cos, sin) if k is None else both(q, k, cos, sin)


def complex_of_tokens_first(xq, xk, freqs_cis):
    cos, sin = (part.repeat_interleave(2, -1) for part in (freqs_cis.real, freqs_cis.imag))
    return both(xq, xk, cos, sin, 2)


TOKENS_FIRST = HEADS.transpose(1, 2)
CALLS = {
    both: ((HEADS, HEADS, COS, SIN), {}),
    one: ((TOKENS_FIRST, COS, SIN), {"unsqueeze_dim": 2}),
    one_of_tokens_first: ((TOKENS_FIRST, SIN, COS), {}),
    keys_are_optional: ((HEADS, HEADS, COS, SIN), {}),
    complex_of_tokens_first: (
        (TOKENS_FIRST, TOKENS_FIRST, torch.complex(COS[..., ::2], SIN[..., ::2])),
        {},
    ),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_a_call_says_how_heads_before_tokens_are_rotated(function):
    args, kwargs = CALLS[function]
    form = RotaryForm.of(function)
    assert form is not None
    unchanged = form.unchanged(args, kwargs)
    assert unchanged is args[0] if isinstance(unchanged, torch.Tensor) else unchanged == args[:2]
    apply, given, cos, sin = form.rotation(args, kwargs)
    assert torch.equal(given, HEADS)
    query, key = apply(2 * HEADS, HEADS, cos, sin)
    expected = both(HEADS, HEADS, COS, SIN)[0]
    torch.testing.assert_close(key, expected)
    torch.testing.assert_close(query, 2 * expected)


def test_queries_may_be_rotated_alone():
    form = RotaryForm.of(keys_are_optional)
    assert form is not None
    args, kwargs = (HEADS,), {"cos": COS, "sin": SIN}
    assert form.unchanged(args, kwargs) is HEADS
    assert form.unchanged((HEADS, None), kwargs) is HEADS
    apply, given, cos, sin = form.rotation(args, kwargs)
    assert given is HEADS
    query, key = apply(2 * HEADS, HEADS, cos, sin)
    torch.testing.assert_close(key, one(HEADS, COS, SIN))
    torch.testing.assert_close(query, 2 * key)


def test_a_function_of_another_form_is_left_alone():
    assert RotaryForm.of(lambda hidden, angles: hidden) is None
    assert RotaryForm.of(lambda q, k, v, cos, sin: (q, k, v)) is None
