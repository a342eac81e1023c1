"""Attention's logits by definition, in each precision."""

import pytest
import torch

from kvlinker.engines.contract.attention import AttentionOptions, attention_scores


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_large_products_in_half_precision(softcap):
    """Before they are scaled, they are more than fp16 can hold."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        (45.0 + torch.randn(2, tokens, 128, generator=generator)).half() for tokens in (3, 20)
    )
    options = AttentionOptions(scale=128**-0.5, softcap=softcap)
    exact = attention_scores(query.float(), key.float(), None, options)
    assert (query.float() @ key.float().mT).min() > torch.finfo(torch.float16).max
    found = attention_scores(query, key, None, options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=2e-3, atol=0)
