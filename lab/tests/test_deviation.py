"""Deviations of layers made by hand."""

import numpy as np
import pytest
import torch

from kvlinker_lab.inspection import (
    LayerView,
    attention_deviation,
    kv_distance,
    relative_kv_distance,
)

TOKENS, HEADS = 3, 2


def layer(key, value, attention):
    """The same key and value in all heads of a token, of one dimension each."""
    return LayerView(
        torch.tensor(key).expand(HEADS, -1)[..., None],
        torch.tensor(value).expand(HEADS, -1)[..., None],
        torch.tensor(attention).expand(HEADS, -1, -1),
    )


FULL = [
    layer([3.0, 3.0, 3.0], [4.0, 4.0, 4.0], [[0.5, 0.5, 0.0]]),
    layer([6.0, 6.0, 6.0], [8.0, 8.0, 8.0], [[0.0, 0.0, 1.0]]),
]
OTHER = [
    layer([3.0, 6.0, 3.0], [4.0, 0.0, 4.0], [[0.5, 0.5, 0.0]]),
    layer([6.0, 6.0, 0.0], [8.0, 9.0, 0.0], [[0.0, 1.0, 0.0]]),
]


def test_distances_of_tokens_are_over_keys_values_and_heads():
    expected = np.sqrt(HEADS) * np.array([[0, 5, 0], [0, 1, 10]])
    np.testing.assert_allclose(kv_distance(FULL, OTHER), expected, rtol=1e-6)


def test_relative_distances_are_shares_of_full():
    expected = np.array([[0, 1, 0], [0, 0.1, 1]])
    np.testing.assert_allclose(relative_kv_distance(FULL, OTHER), expected, rtol=1e-6)
    assert attention_deviation(FULL, OTHER) == pytest.approx((0, 2**0.5))


def test_only_queries_that_both_have_are_compared():
    more = [layer([3.0] * 3, [4.0] * 3, [[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])]
    assert attention_deviation(more, FULL[:1]) == attention_deviation(FULL[:1], more) == (0,)
