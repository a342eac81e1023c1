"""Divergence of reported distributions against that of whole ones."""

import numpy as np
import pytest
import torch

from kvlinker.service.audit.comparison import NextToken, agree, kl_divergence


def distribution(seed, scale=2.0, vocabulary=50):
    logits = scale * torch.randn(
        vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    return torch.log_softmax(logits, -1)


def reported(logprobs, count):
    best = logprobs.topk(count)
    return NextToken(best.indices.numpy(), best.values.numpy())


def exact(p, q):
    return float((p.exp() * (p - q)).sum())


def test_a_whole_vocabulary_gives_the_exact_divergence():
    p, q = distribution(1), distribution(2)
    assert kl_divergence(reported(p, 50), reported(q, 50)) == pytest.approx(exact(p, q))
    assert exact(p, q) > 0.1


@pytest.mark.parametrize("count", [1, 5, 20])
def test_fewer_tokens_give_a_lower_bound(count):
    for seed in range(20):
        p, q = distribution(seed), distribution(seed + 100)
        bound = kl_divergence(reported(p, count), reported(q, count))
        assert 0 <= bound <= exact(p, q) + 1e-9
        assert bound <= kl_divergence(reported(p, 50), reported(q, 50)) + 1e-9


def test_nothing_diverges_from_itself():
    for scale in (0.0, 1.0, 50.0):
        p = reported(distribution(3, scale), 10)
        assert kl_divergence(p, p) == 0
        assert agree(p, p)


def test_distributions_without_a_common_token_diverge_by_a_finite_amount():
    p = NextToken(np.array([1]), np.log([0.999]))
    q = NextToken(np.array([2]), np.log([0.999]))
    assert (
        kl_divergence(p, q) == 0
    )  # nothing is known of either's common part but that it is everything
    assert not agree(p, q)
