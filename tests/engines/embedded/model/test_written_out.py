"""Attention that is written out, in the ways in which models do it, is seen as one call."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kvlinker.engines.embedded.model.interception import Interceptor, intercepted
from kvlinker.engines.embedded.model.written_out import Followed

QUERY, KEY, VALUE = torch.randn(3, 1, 4, 6, 8, generator=torch.Generator().manual_seed(0))
SCALE = 8**-0.5


def matmul(query, key, value, mask):
    scores = torch.matmul(query.to(torch.float32), key.to(torch.float32).transpose(-1, -2))
    scores = scores / math.sqrt(8) + mask
    weights = F.dropout(F.softmax(scores, dim=-1).to(value.dtype), p=0.1, training=False)
    return torch.matmul(weights, value)


def in_place(query, key, value, mask):
    scores = query @ key.transpose(-1, -2)
    scores /= math.sqrt(8)
    return F.softmax(scores + mask, dim=-1, dtype=torch.float32) @ value


def baddbmm(query, key, value, mask):
    query, key = query.view(4, 6, 8), key.view(4, 6, 8)
    scores = torch.baddbmm(torch.zeros(4, 6, 6), query, key.transpose(1, 2), beta=1.0, alpha=SCALE)
    return torch.matmul(torch.nn.Softmax(dim=-1)(scores.view(1, 4, 6, -1) + mask), value)


def by_kernel(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class Noting(Interceptor):
    """Attends as PyTorch does, and notes what it is called with."""

    def __init__(self):
        self.seen = []

    def attend(self, module, query, key, value, options):
        scale = options["scaling"]
        self.seen.append((query, key, value, scale))
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
        return found.transpose(1, 2)


@pytest.mark.parametrize("way", [matmul, in_place, baddbmm, by_kernel])
def test_query_key_value_and_scale_are_those_of_the_model(way):
    noting = Noting()
    mask = torch.full((6, 6), -math.inf).triu_(1)
    query = torch.cat([QUERY[..., :4].as_subclass(Followed), QUERY[..., 4:]], dim=-1)
    with intercepted(noting):
        found = way(query, KEY.as_subclass(Followed), VALUE, mask)
    assert type(found) is torch.Tensor
    torch.testing.assert_close(found, way(QUERY, KEY, VALUE, mask))
    ((query, key, value, scale),) = noting.seen
    assert {type(query), type(key), type(value)} == {torch.Tensor}
    assert torch.equal(query, QUERY)
    assert torch.equal(key, KEY)
    assert scale == pytest.approx(SCALE)


def test_what_else_is_done_to_scores_is_refused():
    scores = QUERY.as_subclass(Followed) @ KEY.transpose(-1, -2)
    with pytest.raises(LookupError, match="tanh"):
        torch.tanh(scores)
