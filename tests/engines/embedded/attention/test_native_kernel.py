import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention.kernel import View, bundle_views
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.native import NativeUnavailableError
from tests.engines.embedded.attention.scenes import Prompt, Shape, linked, make_scene, random_scene
from tests.engines.native.native_targets import EACH, passing_for
from tests.properties import examples


@pytest.fixture(scope="session", params=EACH)
def kernel(request):
    with passing_for(request.param):
        try:
            return NativeAttention()
        except NativeUnavailableError as error:
            pytest.skip(f"no native attention: {error}")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request, monkeypatch):
    """The threads that the kernel takes."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: request.param)


VARIANTS = [
    {},
    {"window": 1},
    {"window": 40},
    {"window": 300},
    {"softcap": 2.0},
    {"softcap": 30.0, "window": 50},
    {"sinks": True},
    {"sinks": True, "window": 30, "softcap": 5.0},
    {"rotated": 0},
    {"pairing": "interleaved"},
    {"pairing": "interleaved", "rotated": 10, "factor": 1.37},
    {"rotated": 20, "factor": 1.37},
]


def check(kernel, scene):
    output = scene.computed(kernel)
    # Queries, weights and output have 8 bits; what rounding does to logits grows as they do.
    bound = scene.expected(magnitude=True) / 64 * max(1, scene.shape.factor) ** 2 + 1e-6
    assert ((output.double() - scene.expected()).abs() <= bound).all()


def own(begin, end):
    return Prompt(((None, end),), queries=tuple(range(begin, end)))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    ("begin", "end"), [(0, 1), (41, 42), (300, 301), (0, 17), (23, 60), (0, 700), (111, 777)]
)
def test_contiguous_queries_over_tokens_of_their_own(kernel, begin, end, variant):
    check(kernel, make_scene([], [own(begin, end)], Shape(**variant), dtype=torch.bfloat16))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(
    "queries", [(3, 4, 5, 90, 91, 200, 511), range(0, 900, 3)], ids=["few", "many"]
)
def test_scattered_queries_over_tokens_of_their_own(kernel, threads, queries, variant):
    prompt = Prompt(((None, queries[-1] + 1),), queries=tuple(queries))
    check(kernel, make_scene([], [prompt], Shape(**variant), dtype=torch.bfloat16))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_prefill_over_chunks(kernel, threads, variant):
    chunks = [100, 37, 260]
    prompt = linked([0, 1, 2, 1], chunks, before=5, behind=300, recompute=16)
    check(kernel, make_scene(chunks, [prompt], Shape(**variant), dtype=torch.bfloat16))


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_decode_step_over_chunks_in_different_orders(kernel, threads, variant):
    chunks = [100, 37, 1060]
    orders = [(0, 1, 2), (2, 1, 0), (1, 1), (2,), ()]
    prompts = [linked(order, chunks, behind=9, recompute=8, decoding=True) for order in orders]
    check(kernel, make_scene(chunks, prompts, Shape(**variant), dtype=torch.bfloat16))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_one_request_that_decodes_is_divided_among_threads(kernel, threads, kv_heads):
    chunks = [900, 1100]
    prompt = linked([1, 0], chunks, behind=300, recompute=8, decoding=True)
    check(
        kernel,
        make_scene(chunks, [prompt], Shape(kv_heads=kv_heads, sinks=True), dtype=torch.bfloat16),
    )


@examples(100)
@given(
    seed=st.integers(0, 100_000),
    variant=st.sampled_from(VARIANTS),
    group=st.sampled_from([1, 2, 4, 7]),
    kv_heads=st.integers(1, 3),
    key_dim=st.sampled_from([20, 32, 64, 80, 96, 128, 256]),
    value_dim=st.sampled_from([1, 17, 32, 64, 80, 128, 256]),
)
@pytest.mark.whole
def test_any_sequences(kernel, seed, variant, group, kv_heads, key_dim, value_dim):
    dims = {"key_dim": key_dim, "value_dim": value_dim, "kv_heads": kv_heads, "group": group}
    check(kernel, random_scene(seed, Shape(**dims | variant), dtype=torch.bfloat16, most=160))


def test_as_wide_as_latents(kernel, threads):
    shape = Shape(1, group=16, key_dim=576, value_dim=576, pairing="interleaved", rotated=64)
    chunks = [100, 37]
    prompt = linked([0, 1, 0], chunks, before=5, behind=30, recompute=9)
    check(kernel, make_scene(chunks, [prompt], shape, dtype=torch.bfloat16))


def test_a_key_of_two_dimensions(kernel):
    check(kernel, random_scene(0, Shape(key_dim=2, value_dim=2), dtype=torch.bfloat16))


@pytest.mark.parametrize("factor", [1.0, 1.37])
@pytest.mark.parametrize("recompute", [0, 16, 60])
def test_as_precise_as_torch(kernel, recompute, factor):
    chunks = [200, 512, 64, 333]
    prompt = linked(range(4), chunks, behind=32, recompute=recompute)
    scene = make_scene(chunks, [prompt], Shape(kv_heads=8, factor=factor), dtype=torch.bfloat16)
    expected = scene.expected()
    ours, torchs = (
        float((scene.computed(one).double() - expected).norm())
        for one in (kernel, TorchAttention())
    )
    assert ours <= 1.05 * torchs
    assert ours <= 5e-3 * float(expected.norm())


def test_what_is_computed_together_is_what_each_gets_alone(kernel, threads):
    chunks = [300, 129, 512]
    prompts = [
        linked(order, chunks, behind=9, recompute=8, decoding=True)
        for order in ((0, 1, 2), (2, 1, 0), (1, 2))
    ]
    scene = make_scene(chunks, prompts, Shape(), dtype=torch.bfloat16)
    assert max(len(bundle.members) for bundle in bundle_views(scene.views)) == 3
    together = scene.computed(kernel)
    for rows, views in scene.sequences:
        alone = scene.computed(kernel, views)[rows]
        assert (together[rows] - alone).norm() <= 5e-3 * alone.norm()


def test_the_same_call_gives_the_same_bits(kernel, threads):
    scene = random_scene(3, Shape(), dtype=torch.bfloat16)
    assert torch.equal(scene.computed(kernel), scene.computed(kernel))


def test_large_scores_do_not_overflow(kernel):
    query = torch.full((1, 20, 64), 100.0, dtype=torch.bfloat16)
    key = torch.linspace(-100, 100, 20).bfloat16()[None, :, None].expand(1, 20, 64).contiguous()
    value = torch.arange(20.0).bfloat16()[None, :, None].expand(1, 20, 64).contiguous()
    output = torch.empty(20, 1, 64, dtype=torch.bfloat16)
    plan = kernel.plan([View(0, slice(0, 20), 0, 0, 0, 20)], np.arange(20))
    kernel.attend(plan, query, [(key, value)], None, AttentionOptions(scale=1.0), output=output)
    torch.testing.assert_close(output.transpose(0, 1), value)  # every query sees its own key alone


@pytest.mark.parametrize("split", [3, 1], ids=["at once", "merged"])
def test_nan_is_not_hidden(kernel, split):
    query = torch.ones(1, 3, 64, dtype=torch.bfloat16)
    key, value = query.clone(), query.clone()
    key[0, 1, 5] = float("nan")
    output = torch.empty(3, 1, 64, dtype=torch.bfloat16)
    views = [View(0, slice(row, row + split), 0, 0, 0, 3) for row in range(0, 3, split)]
    if split == 1:
        views += [View(1, slice(row, row + 1), 0, 0, 0, 1) for row in range(3)]
    plan = kernel.plan(views, np.arange(3))
    kernel.attend(
        plan,
        query,
        [(key, value), (query, value)],
        None,
        AttentionOptions(scale=1.0),
        output=output,
    )
    assert output.isnan().any(dim=2)[:, 0].tolist() == [False, True, True]


@pytest.mark.parametrize("sinks", [False, True])
def test_who_sees_nothing_gets_zero(kernel, threads, sinks):
    scene = make_scene(
        [10],
        [Prompt(((0, 10), (None, 3)), frozenset([0, 1]), (1, 12))],
        Shape(sinks=sinks),
        dtype=torch.bfloat16,
    )
    rows = slice(0, 2)
    few = [View(0, rows, 0, 0, 2, 10), View(0, rows, 0, 0, 0, 2, np.ones(10, bool))]
    for views in (few, [*few, View(1, rows, 11, 11, 0, 2), View(1, slice(1, 2), 11, 11, 0, 2)]):
        output = scene.computed(kernel, views)
        assert (output[0] == 0).all()
        assert (output[1] != 0).all()
    assert (scene.computed(kernel, []) == 0).all()
