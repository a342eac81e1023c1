import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.embedded.attention import torch_kernels
from kvlinker.engines.embedded.attention.kernel import View
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention, merge
from tests.engines.embedded.attention.scenes import Prompt, Shape, linked, make_scene, random_scene
from tests.properties import examples

SMALL = {"key_dim": 16, "value_dim": 16}
VARIANTS = [
    {},
    {"window": 5},
    {"window": 300},
    {"softcap": 2.0},
    {"softcap": 2.0, "window": 40},
    {"sinks": True},
    {"sinks": True, "window": 30},
    {"pairing": "interleaved", "factor": 1.37},
    {"pairing": None, "rotated": 8},
    {"rotated": 0},
]


def check(scene):
    torch.testing.assert_close(
        scene.computed(TorchAttention()).double(), scene.expected(), atol=2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (41, 42), (0, 17), (23, 60), (0, 700), (111, 777), (500, 757)]
)
def test_contiguous_queries_over_tokens_of_their_own(begin, end, variant):
    check(
        make_scene(
            [], [Prompt(((None, end),), queries=tuple(range(begin, end)))], Shape(**SMALL | variant)
        )
    )


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "queries", [(3, 4, 5, 90, 91, 200, 511), range(0, 900, 3)], ids=["few", "many"]
)
def test_scattered_queries_over_tokens_of_their_own(queries, variant):
    prompt = Prompt(((None, queries[-1] + 1),), queries=tuple(queries))
    check(make_scene([], [prompt], Shape(**SMALL | variant)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_prefill_over_chunks(variant):
    chunks = [100, 37, 260]
    prompt = linked([0, 1, 2, 1], chunks, before=5, behind=300, recompute=16)
    check(make_scene(chunks, [prompt], Shape(**SMALL | variant)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_decode_step_over_chunks_in_different_orders(variant):
    chunks = [100, 37, 260]
    orders = [(0, 1, 2), (2, 1, 0), (1, 1), (2,), ()]
    prompts = [linked(order, chunks, behind=9, recompute=8, decoding=True) for order in orders]
    check(make_scene(chunks, prompts, Shape(**SMALL | variant)))


@examples(60)
@given(
    seed=st.integers(0, 100_000),
    variant=st.sampled_from(VARIANTS),
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 7]),
    value_dim=st.sampled_from([8, 16]),
)
def test_any_sequences(seed, variant, kv_heads, group, value_dim):
    shape = Shape(
        **{"key_dim": 16, "value_dim": value_dim, "kv_heads": kv_heads, "group": group} | variant
    )
    check(random_scene(seed, shape, dtype=torch.float32))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_bf16(variant):
    scene = random_scene(7, Shape(**variant), dtype=torch.bfloat16)
    difference = scene.computed(TorchAttention()).double() - scene.expected()
    assert (
        difference.abs() <= scene.expected(magnitude=True) / 64 + 1e-6
    ).all()  # a result is rounded at each merge


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_many_query_heads_of_one_key_head(variant, monkeypatch):
    """As of latents: there are too many for a row of a mask each."""
    monkeypatch.setattr(torch_kernels, "FOLDED_LIMIT", 300)
    chunks = [50, 37]
    prompt = linked([0, 1, 0], chunks, before=5, behind=30, recompute=9)
    check(make_scene(chunks, [prompt], Shape(**SMALL | {"kv_heads": 1, "group": 32} | variant)))


@pytest.mark.parametrize("sinks", [False, True])
def test_who_sees_nothing_gets_zero(sinks):
    scene = make_scene(
        [10], [Prompt(((0, 10), (None, 3)), frozenset([0, 1]), (1, 12))], Shape(sinks=sinks)
    )
    hidden = [
        View(0, slice(0, 2), 0, 0, 2, 10),
        View(0, slice(0, 2), 0, 0, 0, 2, np.ones(10, bool)),
    ]
    output = scene.computed(TorchAttention(), hidden)
    assert (output[0] == 0).all()
    assert (output[1] != 0).all()
    assert (scene.computed(TorchAttention(), []) == 0).all()


def test_the_same_call_gives_the_same_bits():
    scene = random_scene(3, Shape(), dtype=torch.bfloat16)
    assert torch.equal(scene.computed(TorchAttention()), scene.computed(TorchAttention()))


def test_merging_two_halves_is_attention_over_the_whole():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 30, generator=generator)
    value = torch.randn(2, 30, 8, generator=generator)

    def part(keys):
        own = scores[..., keys]
        return torch.softmax(own, -1) @ value[:, keys], torch.logsumexp(own, -1)

    sources = torch.stack([torch.arange(5), torch.arange(5, 10)], dim=1)
    merged = merge([part(slice(0, 11)), part(slice(11, 30))], sources, None)
    torch.testing.assert_close(merged, torch.softmax(scores, -1) @ value)


def test_what_is_not_finite_reaches_no_other_query():
    """Not even as nothing of it, where a query has fewer parts than others, or none."""
    outputs = torch.ones(2, 4, 8)
    outputs[:, 3] = float("nan")
    lse = torch.zeros(2, 4)
    lse[:, 3] = float("nan")
    sources = torch.tensor([[0, 1], [2, -1], [-1, -1], [1, 3]])
    merged = merge([(outputs, lse)], sources, None)
    assert torch.equal(merged[:, :3], torch.tensor([1.0, 1.0, 0.0])[:, None].expand(2, 3, 8))
    assert merged[:, 3].isnan().all()
