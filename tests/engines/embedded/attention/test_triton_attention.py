"""Triton's kernels, interpreted, compute what attention is by definition."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.embedded.attention import tiles
from kvlinker.engines.embedded.attention.kernel import View
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.attention.triton_attention import TileKind, TritonAttention
from tests.engines.embedded.attention.scenes import Shape, linked, make_scene, random_scene
from tests.engines.embedded.toy_rotary import toy_rotary
from tests.engines.gpu.interpreting import computes_in_bfloat16
from tests.properties import examples

pytestmark = pytest.mark.whole  # Triton is interpreted, which takes minutes

SMALL: dict[str, Any] = {"key_dim": 16, "value_dim": 16}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"window": 5},
    {"softcap": 2.0},
    {"sinks": True, "window": 30},
    {"pairing": "interleaved", "factor": 1.37},
    {"rotated": 8},
    {"rotated": 0},
]


def check(scene):
    output = scene.computed(TritonAttention())
    torch.testing.assert_close(output.double(), scene.expected(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_requests_over_the_same_chunks(variant):
    """One computes its prompt, others decode, over chunks in different orders."""
    chunks = [50, 37]
    prompts = [
        linked([0, 1, 0], chunks, before=5, behind=20, recompute=4),
        linked([1, 0], chunks, behind=9, recompute=8, decoding=True),
        linked([1], chunks, behind=3, decoding=True),
    ]
    check(make_scene(chunks, prompts, Shape(**SMALL | variant)))


@examples(20)
@given(
    seed=st.integers(0, 100_000),
    variant=st.sampled_from(VARIANTS),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 4, 7]),
    value_dim=st.sampled_from([8, 16]),
)
def test_any_sequences(seed, variant, kv_heads, group, value_dim):
    sizes: dict[str, Any] = {
        "key_dim": 16,
        "value_dim": value_dim,
        "kv_heads": kv_heads,
        "group": group,
    }
    check(random_scene(seed, Shape(**sizes | variant), dtype=torch.float32, most=40))


@pytest.mark.parametrize("sinks", [False, True])
def test_the_keys_of_few_queries_are_divided(monkeypatch, sinks):
    """So that their programs fill a GPU; results are merged by their log-sum-exp."""
    monkeypatch.setattr(tiles, "KEY_MINIMUM", 24)
    chunks = [100, 61]
    prompts = [linked(order, chunks, behind=9, decoding=True) for order in ([0, 1], [1])]
    scene = make_scene(chunks, prompts, Shape(**SMALL, sinks=sinks))
    check(scene)
    plan = TritonAttention().plan(scene.views, scene.positions)
    tables = plan.tables(TileKind(None, rows=8, heads=2, kv_heads=2, group=2))
    assert tables.targets == 2
    assert tables.tiles > len(plan.bundles)


@pytest.mark.parametrize(
    ("dtype", "variant"),
    [(torch.float16, VARIANTS[1]), *((torch.bfloat16, variant) for variant in VARIANTS[::3])],
    ids=str,
)
def test_in_16_bits_results_are_as_near_as_pytorchs(monkeypatch, variant, dtype):
    """To attention in fp64 of the same 16 bits; with partial results merged in fp32."""
    computes_in_bfloat16(monkeypatch)
    monkeypatch.setattr(tiles, "KEY_MINIMUM", 24)
    chunks = [50, 37]
    prompts = [
        linked([0, 1, 0], chunks, before=5, behind=20, recompute=4),
        linked([1, 0], chunks, behind=9, recompute=8, decoding=True),
    ]
    scene = make_scene(chunks, prompts, Shape(**SMALL | variant), dtype=dtype)
    expected = scene.expected()
    errors = [
        float((scene.computed(kernel).double() - expected).norm() / expected.norm())
        for kernel in (TritonAttention(), TorchAttention())
    ]
    assert errors[0] < max(1.5 * errors[1], torch.finfo(dtype).eps), errors


def test_who_sees_nothing_gets_zeros():
    scene = make_scene([30], [linked([0], [30], decoding=True)], Shape(**SMALL))
    assert not scene.computed(TritonAttention(), views=[]).any()
    hidden = View(0, slice(0, 1), 0, 0, 0, 30, np.ones(30, bool))
    assert not scene.computed(TritonAttention(), views=[hidden]).any()


def test_latents_are_attended_to_as_they_are_kept():
    """More heads share one key than a tile has, and values are the part of it that is not
    rotated."""
    generator = torch.Generator().manual_seed(1)
    rotary, positions = toy_rotary(16, 16), np.array([3, 20, 41])
    joined = torch.randn(1, 42, 16 + 32, generator=generator)
    query = torch.randn(20, 3, 16 + 32, generator=generator)
    views, options = [View(0, slice(0, 3), 0, 0, 0, 42)], AttentionOptions(scale=0.2)
    outputs = []
    for kernel in (TritonAttention(), TorchAttention()):
        outputs.append(torch.full((3, 20, 48), float("nan")))
        plan = kernel.plan(views, positions)
        kernel.attend(plan, query, [(joined, joined)], rotary, options, output=outputs[-1])
    torch.testing.assert_close(outputs[0][..., 16:], outputs[1][..., 16:], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pairing", ["halves", "interleaved", None])
def test_new_keys_are_rotated_on_their_way_into_the_pool(pairing):
    rotary = None if pairing is None else toy_rotary(16, 12, pairing=pairing)
    positions, slots = np.array([2, 9, 40]), torch.tensor([7, 0, 3])
    key, value = torch.randn(2, 3, 16), torch.randn(3, 2, 8).transpose(0, 1)
    pools = []
    for kernel in (TritonAttention(), TorchAttention()):
        joined = torch.zeros(2, 10, 24)  # as latents lie
        pools.append(joined)
        plan = kernel.plan([], positions)
        kernel.write(plan, key, value, slots, rotary, (joined[..., :16], joined[..., 16:]))
    torch.testing.assert_close(*pools)
