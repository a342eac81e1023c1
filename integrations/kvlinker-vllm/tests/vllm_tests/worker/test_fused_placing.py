"""Placing by one kernel, into caches as vLLM's backends lay them out: by Triton's, interpreted, and
by native code."""

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("triton")

from tests.engines.gpu.interpreting import computes_in_bfloat16
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope

from kvlinker.engines.gpu import launching
from kvlinker.engines.native.placing import native_placing
from kvlinker.store import ChunkKV, LayerKV
from kvlinker_vllm.adapter import AttentionLayer, CacheGroup
from kvlinker_vllm.worker import fused_placing
from kvlinker_vllm.worker.fused_placing import FusedPlacing
from kvlinker_vllm.worker.layers import ChunkPart, layer_launches

pytestmark = pytest.mark.interpreted

HEADS, DIM, BLOCKS, BLOCK_SIZE = 2, 16, 6, 16
FORMS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def heads_last(cache):
    """As FlashAttention's: [blocks, heads, block_size, 2 * dim]."""
    return cache.transpose(1, 2).split(DIM, dim=-1)


def values_behind(cache):
    """As FlashInfer's where heads come first: [blocks, 2 * heads, block_size, dim]."""
    return cache.transpose(1, 2).split(HEADS, dim=2)


def turned(cache):
    """As on CPUs: [blocks, heads, 2 * block_size, dim], and of a block's keys all first numbers
    before all second ones."""
    key, value = cache.view(BLOCKS, HEADS, -1, DIM).chunk(2, dim=2)
    columns = key.flatten(2).unflatten(2, (DIM, BLOCK_SIZE))
    return columns.permute(0, 3, 1, 2), value.transpose(1, 2)


def mirrored(cache):
    """As nobody's."""
    key, value = heads_last(cache)
    return key.flip(-1), value


SHAPES = {
    heads_last: (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
    values_behind: (BLOCKS, 2 * HEADS, BLOCK_SIZE, DIM),
    turned: (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
    mirrored: (BLOCKS, HEADS, BLOCK_SIZE, 2 * DIM),
}


class Backend:
    """Writes slot by slot, as vLLM's own update does, in fp8 where it has a form of that."""

    def __init__(self, layout, form=None):
        self.layout = layout
        self.form = form

    def rounded(self, values, scale):
        if self.form is None:
            return values
        most = torch.finfo(self.form).max
        return (values.float() / scale).clamp(-most, most).to(self.form).view(torch.uint8)

    def do_kv_cache_update(self, layer, key, value, cache, slots):
        if self.layout is mirrored:
            key = key.flip(-1)
        key, value = self.rounded(key, layer._k_scale), self.rounded(value, layer._v_scale)
        keys, values = heads_last(cache) if self.layout is mirrored else self.layout(cache)
        for token, slot in enumerate(slots.tolist()):
            keys[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = key[token]
            values[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = value[token]


def worker(layout, dtype=torch.float32, form=None, groups=1, **changes):
    """A worker's model, and its layers: two with one rotary embedding, one with another, one with
    none. ``form``: its caches are in fp8. ``groups``: layers are in so many, in turn, which share
    their memory."""
    facts = {
        "device": torch.device("cpu"),
        "dtype": dtype,
        "has_rounded_cache": form is not None,
        "max_model_len": 256,
        "to_device": lambda values: values,
        "groups": [CacheGroup(BLOCK_SIZE)] * groups,
    }
    with set_current_vllm_config(VllmConfig()):
        rope: Any = {"rope_type": "default", "rope_theta": 10000.0}
        halves = get_rope(DIM, 256, is_neox_style=True, rope_parameters=rope, dtype=dtype)
        pairs = get_rope(DIM, 256, is_neox_style=False, rope_parameters=rope, dtype=dtype)
    layers: list[AttentionLayer] = []
    halves, pairs = copy.deepcopy((halves, pairs))  # vLLM keeps what it makes
    for index, rotary in enumerate((halves, pairs, halves, None)):
        cache = torch.zeros(SHAPES[layout], dtype=dtype if form is None else torch.uint8)
        if index % groups:
            cache = layers[-1].module.kv_cache
        module = SimpleNamespace(impl=Backend(layout, form), kv_cache=cache)
        module._k_scale, module._v_scale = torch.tensor(0.5 + index), torch.tensor(2.0)
        layers.append(
            AttentionLayer(
                f"layer {index}", module, HEADS, DIM, DIM, 0, HEADS, index % groups, rotary
            )
        )
    return SimpleNamespace(**facts | changes), layers


@pytest.fixture
def launches(monkeypatch, interpreted):
    """The CPU passes for a GPU; (layers, parts) of each launch are noted."""
    found = []
    launch = launching.place_kv

    def noted(sources, *args, **options):
        found.append((len(sources), len(sources[0])))
        launch(sources, *args, **options)

    monkeypatch.setattr(fused_placing, "has_kernels", lambda _: True)
    monkeypatch.setattr(launching, "place_kv", noted)
    return found


@pytest.fixture
def native(monkeypatch):
    """Parts in each launch of native code, and layers, are noted."""
    placing = native_placing()
    if placing is None:
        pytest.skip("no native code for this CPU")
    found = []

    def noted(sources, *args, **options):
        found.append((len(sources), len(sources[0])))
        placing.place(sources, *args, **options)

    kernel = SimpleNamespace(place=noted, dtypes=placing.dtypes, forms=placing.forms)
    monkeypatch.setattr(fused_placing, "native_placing", lambda: kernel)
    return found


def chunk_part(tokens, first, last, start, slots, dtype=torch.float32):
    layers = [torch.randn(2, HEADS, tokens, DIM).to(dtype) for _ in range(4)]
    positions = torch.arange(first, last) + start
    kv = ChunkKV(tuple(LayerKV(*pair) for pair in layers))
    return ChunkPart(kv, first, last, start, positions, slots)


def run(launches):
    for _, work in launches:
        work()


def placed(layers, launches):
    """What is in all caches once the launches are carried out."""
    for layer in layers:
        layer.module.kv_cache.fill_(7)
    run(launches)
    return [layer.module.kv_cache.clone() for layer in layers]


def some_parts(dtype=torch.float32):
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)
    return [
        chunk_part(40, 3, 40, 20, slots[:37], dtype),
        chunk_part(9, 0, 9, 100, slots[37:46], dtype),
        chunk_part(9, 2, 3, -2, slots[46:47], dtype),
    ]


@pytest.mark.parametrize("layout", [heads_last, values_behind])
def test_all_chunks_are_placed_by_a_launch_for_each_rotary_embedding(layout, launches):
    bound, layers = worker(layout)
    placing = fused_placing.fused_placing(bound, layers)
    assert placing is not None
    assert not any(layer.module.kv_cache.any() for layer in layers)
    parts = some_parts()
    expected = placed(layers, layer_launches(layers, [parts]))
    launches.clear()
    found = placed(layers, placing.launches([parts]))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert sorted(launches) == [(1, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("layout", [turned, heads_last, values_behind])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_cpus_native_code_places_all_chunks(layout, dtype, native):
    bound, layers = worker(layout, dtype=dtype)
    placing = fused_placing.fused_placing(bound, layers)
    assert placing is not None
    parts = some_parts(dtype)
    expected = placed(layers, layer_launches(layers, [parts]))
    native.clear()
    found = placed(layers, placing.launches([parts]))
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
    assert sorted(native) == [(1, 3), (1, 3), (2, 3)]


def test_native_code_is_not_compiled_where_it_is_not_wanted(native):
    assert fused_placing.fused_placing(*worker(turned), native=False) is None


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"layout": mirrored}, "layer 0 is laid out in another way"),
        ({"layout": heads_last, "form": torch.float8_e5m2}, "the KV cache is in fp8"),
        ({"layout": heads_last, "dtype": torch.float16}, "computes in torch.float16"),
    ],
)
def test_what_native_code_does_not_place_is_left_to_vllm(changes, told, native, caplog):
    with caplog.at_level(logging.INFO):
        assert fused_placing.fused_placing(*worker(**changes)) is None
    assert told in caplog.text


def test_a_launch_has_few_layers_and_the_first_ones_come_first(launches, monkeypatch):
    monkeypatch.setattr(fused_placing, "LAYERS_AT_ONCE", 1)
    bound, layers = worker(heads_last)
    placing = FusedPlacing(bound, layers, launching.TritonPlacing())
    assert [launch.layers for launch in placing.launches([some_parts()])] == [
        (0,),
        (1,),
        (2,),
        (3,),
    ]
    assert list(placing.launches([[]])) == []


def test_groups_of_layers_get_their_own_parts(launches):
    """Layers 0 and 2 have other blocks than 1 and 3, in the same memory."""
    bound, layers = worker(heads_last, groups=2)
    placing = fused_placing.fused_placing(bound, layers)
    assert placing is not None
    first, *others = some_parts()
    parts = [[first], others]
    expected = placed(layers, layer_launches(layers, parts))
    torch.testing.assert_close(
        placed(layers, placing.launches(parts)), expected, atol=1e-5, rtol=1e-5
    )
    alone = placed(layers, placing.launches([[], others]))
    slots = first.slots // BLOCK_SIZE, slice(None), first.slots % BLOCK_SIZE
    assert (alone[0][slots] == 7).all()
    assert not (expected[0][slots] == 7).any()


@pytest.mark.parametrize("layout", [heads_last, values_behind])
@pytest.mark.parametrize("form", FORMS.values(), ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_caches_in_fp8_are_written_with_vllms_scales(layout, form, dtype, launches, monkeypatch):
    """A few keys that are rotated in another order of operations round the other way."""
    computes_in_bfloat16(monkeypatch)
    bound, layers = worker(layout, dtype=dtype, form=form)
    placing = fused_placing.fused_placing(bound, layers)
    assert placing is not None
    assert placing.form is form
    parts = some_parts(dtype)
    pairs = zip(
        placed(layers, placing.launches([parts])),
        placed(layers, layer_launches(layers, [parts])),
        strict=True,
    )
    for ours, theirs in pairs:
        differ = (ours != theirs).float().mean()
        assert differ < (0.002 if dtype is torch.float32 else 0.02)
        numbers = [each.view(form).float() for each in (ours, theirs)]
        torch.testing.assert_close(*numbers, rtol=0.26, atol=1e-2)


@pytest.mark.parametrize(
    ("layout", "changes", "told"),
    [
        (mirrored, {}, "layer 0 is laid out in another way"),
        (heads_last, {"dtype": torch.float64}, "computes in torch.float64"),
    ],
)
def test_caches_of_other_kinds_are_left_to_vllm(layout, changes, told, launches, caplog):
    with caplog.at_level(logging.INFO):
        assert fused_placing.fused_placing(*worker(layout, **changes)) is None
    assert told in caplog.text


def test_a_rotary_embedding_with_other_tables_is_left_to_vllm(launches, caplog):
    bound, layers = worker(heads_last)
    layers[1].rotary.cos_sin_cache = layers[1].rotary.cos_sin_cache.roll(1, 0)
    layers[1].rotary.forward_cpu = lambda positions, query, key: (
        query,
        layers[0].rotary.forward_cpu(positions, query, key)[1],
    )
    with caplog.at_level(logging.INFO):
        assert fused_placing.fused_placing(bound, layers) is None
    assert "places something else" in caplog.text
