"""What observers see by native code, against PyTorch's weights of every head."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.execution import observing
from kvlinker.engines.embedded.execution.observing import LayerAttention, Observation
from tests.engines.embedded.attention.scenes import Prompt, Shape, linked, make_scene
from tests.engines.native.native_targets import EACH, passing_for

CHUNKS = [100, 37, 160]
VARIANTS = [
    {},
    {"window": 40},
    {"softcap": 2.0},
    {"sinks": True},
    {"group": 3, "key_dim": 48},
    {"kv_heads": 1, "group": 40, "key_dim": 16},
    {"pairing": "interleaved", "factor": 1.37},
    {"rotated": 8, "window": 70, "sinks": True},
    {"rotated": 0},
]


def scene_of(variant, recompute, last):
    """A prompt with chunks, of which the second sequence computes its ``last`` tokens."""
    prompt = linked([0, 1, 2, 1], CHUNKS, behind=last, recompute=recompute)
    other = Prompt(((1, 37), (None, 30)), queries=tuple(range(37, 67)))
    shape = Shape(**{"key_dim": 64, "value_dim": 16} | variant)
    return make_scene(CHUNKS, [other, prompt], shape, dtype=torch.bfloat16)


def observed(scene, first, last, *, native):
    """The weights of the second sequence's queries [first, last) of those that are computed."""
    rows, _ = scene.sequences[1]
    found = []

    class Asking:
        def observe(self, layer, start, tokens, weights):
            found.append(weights(first, last))

    run: Any = SimpleNamespace(observer=Asking(), start=0, tokens=range(rows.stop - rows.start))
    layer = LayerAttention(
        scene.views,
        scene.positions,
        scene.query,
        scene.segments,
        scene.rotary,
        scene.options,
        None,
    )
    Observation([(run, rows)], native=native).show(0, layer)
    return found[0]


def check(kernel, scene, first, last):
    """The kernel's weights of the second sequence's queries [first, last) against PyTorch's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(observing, "native_attention", lambda: kernel)
        weights = observed(scene, first, last, native=True)
        patched.setattr(observing, "native_attention", lambda: None)
        expected = observed(scene, first, last, native=False)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights, expected, atol=2e-5, rtol=4e-3)
    if scene.options.sinks is None:
        torch.testing.assert_close(weights.sum(1), torch.ones(last - first), atol=2e-5, rtol=0)


@pytest.fixture(scope="module", params=EACH)
def kernel(request):
    with passing_for(request.param):
        return NativeAttention()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("recompute", [0, 16])
@pytest.mark.parametrize("left_out", [(0, 0), (3, 20), (80, 0)], ids=str)
def test_native_weights_are_pytorchs(kernel, variant, recompute, left_out, monkeypatch):
    scene = scene_of(variant, recompute, 90)
    rows, _ = scene.sequences[1]
    weigh = Mock(wraps=kernel.mean_weights)
    monkeypatch.setattr(kernel, "mean_weights", weigh)
    check(kernel, scene, left_out[0], rows.stop - rows.start - left_out[1])
    weigh.assert_called_once()


@pytest.mark.parametrize("variant", [{"pairing": None, "rotated": 8}, {"group": 65}], ids=str)
def test_what_native_code_does_not_weigh_is_pytorchs(kernel, variant, monkeypatch):
    monkeypatch.setattr(kernel, "mean_weights", lambda *_: pytest.fail("native"))
    check(kernel, scene_of({"kv_heads": 1, "key_dim": 16} | variant, 0, 90), 0, 90)
