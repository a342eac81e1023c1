import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.embedded.attention.torch_kernels import attend, merge
from kvlinker.engine.attention import AttentionOptions, Queries


def by_definition(positions, query, key, value, options):
    """Softmax attention written out in fp64: [heads, queries, value_dim]."""
    query, key, value = query.double(), key.double(), value.double()
    copies = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(copies, 0), value.repeat_interleave(copies, 0)
    scores = query @ key.transpose(1, 2) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    keys = torch.arange(key.shape[1])
    hidden = keys[None] > positions[:, None]
    if options.window is not None:
        hidden |= keys[None] <= positions[:, None] - options.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[1]]
    return weights @ value


def check(positions, *, window=None, softcap=None, sinks=False, heads=4, kv_heads=2, value_dim=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    length = int(positions[-1]) + 1
    query = torch.randn(heads, len(positions), 16, generator=generator)
    key = torch.randn(kv_heads, length, 16, generator=generator)
    value = torch.randn(kv_heads, length, value_dim, generator=generator)
    options = AttentionOptions(
        scale=0.3, window=window, softcap=softcap, sinks=torch.randn(heads, generator=generator) if sinks else None
    )
    ours = attend(Queries(positions), query, key, value, options)
    expected = by_definition(positions, query, key, value, options)
    torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=2e-5)


VARIANTS = [
    {},
    {"window": 5},
    {"window": 300},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 40},
    {"sinks": True},
    {"sinks": True, "window": 30},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (41, 42), (0, 17), (23, 60), (0, 700), (111, 777), (500, 757)])
def test_contiguous_queries(begin, end, variant):
    check(torch.arange(begin, end), **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_scattered_queries(variant):
    check(torch.tensor([3, 4, 5, 90, 91, 200, 511]), **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_more_scattered_queries_than_one_mask_holds(variant):
    check(torch.arange(0, 900, 3), **variant)


@settings(max_examples=30, deadline=None)
@given(
    st.sets(st.integers(0, 400), min_size=1, max_size=40),
    st.sampled_from(VARIANTS),
    st.sampled_from([(4, 4), (4, 2), (4, 1)]),
    st.integers(0, 1000),
)
def test_any_positions_and_any_grouping(positions, variant, heads, seed):
    check(torch.tensor(sorted(positions)), heads=heads[0], kv_heads=heads[1], seed=seed, **variant)


def test_values_may_be_narrower_than_keys():
    check(torch.arange(10, 30), value_dim=8, softcap=3.0)


def test_merging_two_halves_is_attention_over_the_whole():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 30, generator=generator)
    value = torch.randn(2, 30, 8, generator=generator)

    def part(keys):
        own = scores[..., keys]
        return torch.softmax(own, -1) @ value[:, keys], torch.logsumexp(own, -1)

    output, lse = merge(part(slice(0, 11)), part(slice(11, 30)))
    torch.testing.assert_close(output, torch.softmax(scores, -1) @ value)
    torch.testing.assert_close(lse, torch.logsumexp(scores, -1))
