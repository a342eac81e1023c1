import logging
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlinker.embedded.attention import kernels, native
from kvlinker.embedded.attention.kernels import NativeAttention, TorchAttention, choose_kernel
from kvlinker.embedded.attention.native import NativeUnavailableError, load_library
from kvlinker.embedded.attention.torch_kernels import attend
from kvlinker.embedded.batch import Batch, Run
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.model.loading import prepare_model
from kvlinker.embedded.pool import KVPool
from kvlinker.embedded.runner import Runner
from kvlinker.engine.attention import AttentionOptions, Queries
from kvlinker.research.bench.shapes import byte_tokenizer
from tests.embedded.test_attention import by_definition
from tests.toy_models import tiny_model

SOURCE = Path(native.__file__).with_name("attention.cpp")
CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def kernel():
    try:
        return NativeAttention()
    except NativeUnavailableError as error:
        pytest.skip(f"no native attention: {error}")


@pytest.fixture
def chosen_anew():
    """The choice between kernels is remembered; forget it before and after."""
    kernels._native_or_torch.cache_clear()
    yield
    kernels._native_or_torch.cache_clear()


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def random(heads, rows, dim, generator):
    return torch.randn(heads, rows, dim, generator=generator).bfloat16()


def pooled(tensor, before, behind):
    """The tensor as a part of a larger pool that holds NaN elsewhere, with ``behind`` rows of that still in view."""
    heads, rows, dim = tensor.shape
    pool = torch.full((heads, before + rows + behind + 1, dim), float("nan"), dtype=tensor.dtype)
    pool[:, before : before + rows] = tensor
    return pool[:, before : before + rows + behind]


def check(
    kernel, positions, *, group=2, kv_heads=2, key_dim=64, value_dim=64, window=None, softcap=None, sinks=False, seed=0
):
    generator = torch.Generator().manual_seed(seed)
    positions = torch.as_tensor(positions)
    heads, length = group * kv_heads, int(positions[-1]) + 1
    query = random(len(positions), heads, key_dim, generator).transpose(0, 1)
    key, value = random(kv_heads, length, key_dim, generator), random(kv_heads, length, value_dim, generator)
    options = AttentionOptions(
        scale=1.3 * key_dim**-0.5,
        window=window,
        softcap=softcap,
        sinks=torch.randn(heads, generator=generator).bfloat16() if sinks else None,
    )
    output = torch.full((len(positions), heads, value_dim), float("nan"), dtype=torch.bfloat16).transpose(0, 1)
    kernel.attend(
        Queries(positions), query, pooled(key, 5, seed % 3), pooled(value, 7, seed % 3), options, output=output
    )
    expected = by_definition(positions, query, key, value, options)
    magnitude = by_definition(positions, query, key, value.abs(), options)
    assert ((output.double() - expected).abs() <= magnitude / 128 + 1e-6).all()  # weights and output have 8 bits


VARIANTS = [
    {},
    {"window": 1},
    {"window": 40},
    {"window": 300},
    {"softcap": 2.0},
    {"softcap": 30.0, "window": 50},
    {"sinks": True},
    {"sinks": True, "window": 30, "softcap": 5.0},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize(("begin", "end"), [(0, 1), (41, 42), (300, 301), (0, 17), (23, 60), (0, 700), (111, 777)])
def test_contiguous_queries(kernel, begin, end, variant):
    check(kernel, range(begin, end), **variant)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("positions", [(3, 4, 5, 90, 91, 200, 511), range(0, 900, 3)], ids=["few", "many"])
def test_scattered_queries(kernel, threads, positions, variant):
    check(kernel, positions, **variant)


@settings(max_examples=150, deadline=None)
@given(
    positions=st.sets(st.integers(0, 600), min_size=1, max_size=60).map(sorted),
    variant=st.sampled_from(VARIANTS),
    group=st.sampled_from([1, 2, 4, 7]),
    kv_heads=st.integers(1, 3),
    key_dim=st.sampled_from([2, 18, 32, 64, 96, 128]),
    value_dim=st.sampled_from([1, 17, 32, 64, 80, 96, 128]),
    seed=st.integers(0, 1000),
)
def test_any_shape(kernel, positions, variant, group, kv_heads, key_dim, value_dim, seed):
    dims = {"key_dim": key_dim, "value_dim": value_dim}
    check(kernel, positions, group=group, kv_heads=kv_heads, seed=seed, **dims, **variant)


def test_as_precise_as_torch(kernel):
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(100, 400, 3)
    query, key, value = (random(heads, rows, 64, generator) for heads, rows in ((8, 100), (4, 398), (4, 398)))
    options = AttentionOptions(scale=0.125)
    expected = by_definition(positions, query, key, value, options)
    ours = torch.empty_like(query)
    kernel.attend(Queries(positions), query, key, value, options, output=ours)
    torchs = attend(Queries(positions), query, key, value, options)
    assert (ours.double() - expected).norm() <= 1.05 * (torchs.double() - expected).norm()


def test_large_scores_do_not_overflow(kernel):
    query = torch.full((1, 20, 64), 100.0, dtype=torch.bfloat16)
    key = torch.linspace(-100, 100, 20).bfloat16()[None, :, None].expand(1, 20, 64).contiguous()
    value = torch.arange(20.0).bfloat16()[None, :, None].expand(1, 20, 64).contiguous()
    output = torch.empty_like(query)
    kernel.attend(Queries(torch.arange(20)), query, key, value, AttentionOptions(scale=1.0), output=output)
    torch.testing.assert_close(output, value)  # every query sees its own key alone


def test_nan_is_not_hidden(kernel):
    query = torch.ones(1, 3, 64, dtype=torch.bfloat16)
    key, value = query.clone(), query.clone()
    key[0, 1, 5] = float("nan")
    output = torch.empty_like(query)
    kernel.attend(Queries(torch.arange(3)), query, key, value, AttentionOptions(scale=1.0), output=output)
    assert output.isnan().any(dim=2).tolist() == [[False, True, True]]


def test_a_requests_runs_are_one_group(kernel):
    def run(slot, start, length):
        return Run(slot, start, np.zeros(length, dtype=np.int64))

    groups = kernel.group(Batch((run(0, 3, 2), run(0, 9, 1), run(50, 0, 4))), CPU)
    found = [(group.rows, group.slot, group.queries.positions.tolist()) for group in groups]
    assert found == [(slice(0, 3), 0, [3, 4, 9]), (slice(3, 7), 50, [0, 1, 2, 3])]


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-softcap", "gpt_oss-sinks"])
def test_models_answer_as_with_torch(kernel, chosen_anew, family):
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    tokens = np.random.default_rng(0).integers(3, 256, 200)
    parts = [(0, 90), (120, 121), (130, 140), (199, 200)]

    def logits(native_attention):
        pool = KVPool(loaded.layers, 420, dtype=loaded.dtype, device=loaded.device)
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        runner = Runner(loaded.model, loaded.layers, pool, native_attention=native_attention)
        assert isinstance(runner._kernel, NativeAttention) == native_attention
        runs = [
            Run(slot, begin, tokens[begin:end], end == 200, owner=slot) for slot in (0, 210) for begin, end in parts
        ]
        result = runner.step(Batch(tuple(runs)))
        assert list(result.logits) == [0, 210]
        return torch.stack(list(result.logits.values()))

    ours, torchs = logits(True), logits(False)
    assert (ours - torchs).norm() <= 5e-2 * torchs.norm()


def choose(*, dtype=torch.bfloat16, device=CPU, use_native=True):
    return choose_kernel((), dtype=dtype, device=device, use_native=use_native)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float32}, {"device": torch.device("cuda")}, {"use_native": False}], ids=str
)
def test_torch_where_native_code_does_not_fit(changes):
    assert isinstance(choose(**changes), TorchAttention)


def test_torch_for_odd_widths():
    odd = LayerShape(query_heads=1, kv_heads=1, key_dim=33, value_dim=33, rotary=None)
    assert isinstance(choose_kernel((odd,), dtype=torch.bfloat16, device=CPU), TorchAttention)


def test_torch_on_other_cpus(chosen_anew, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
        assert isinstance(choose(), TorchAttention)
    assert [record.message for record in caplog.records] == [
        "Attention takes PyTorch's kernels: the CPU has no AVX512-BF16."
    ]


@pytest.fixture
def capable(monkeypatch):
    """The CPU passes for one that has what native code needs."""
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize(
    ("compiler", "message"), [("/nowhere/g++", "No such file"), ("false", "false failed: no message")]
)
def test_torch_where_nothing_compiles(capable, chosen_anew, monkeypatch, caplog, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
    assert message in caplog.text


def test_torch_where_the_cache_cannot_be_written(capable, chosen_anew, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(choose(), TorchAttention)


def test_torch_where_native_code_is_wrong(kernel, chosen_anew, monkeypatch, caplog):
    monkeypatch.setattr(NativeAttention, "attend", lambda *_, output, **__: output.zero_())
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
    assert "wrong on this machine" in caplog.text


def test_a_source_that_does_not_compile_says_why(kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(NativeUnavailableError, match=r"failed: .*error"):
        load_library(source)
    assert list((tmp_path / "kvlinker").iterdir()) == []


def _loads(source):
    load_library(source)
    return True


@pytest.mark.slow
def test_processes_build_at_the_same_time(kernel, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as processes:
        assert list(processes.map(_loads, [SOURCE] * 3)) == [True] * 3
    (built,) = (tmp_path / "kvlinker").iterdir()
    before = built.stat().st_mtime_ns
    load_library(SOURCE)
    assert built.stat().st_mtime_ns == before
