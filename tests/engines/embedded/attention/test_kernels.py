import logging
from itertools import chain

import pytest
import torch

from kvlinker.engines import native
from kvlinker.engines.embedded.attention import kernels
from kvlinker.engines.embedded.attention.kernels import choose_kernel
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.position_scores import (
    NativeDots,
    dot_products,
    native_dots,
)
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.model.anatomy import LayerShape
from kvlinker.engines.native import NativeUnavailableError
from kvlinker.engines.native.targets import TARGETS
from tests.engines.embedded.toy_rotary import toy_rotary
from tests.engines.native.machine_code import functions, readable
from tests.engines.native.native_targets import passing_for

CPU = torch.device("cpu")


@pytest.fixture
def native_kernel():
    try:
        return NativeAttention()
    except NativeUnavailableError as error:
        pytest.skip(f"no native attention: {error}")


def layer(**changes):
    return LayerShape(
        **{"query_heads": 1, "kv_heads": 1, "key_dim": 64, "value_dim": 64, "rotary": None}
        | changes
    )


def choose(*, dtype=torch.bfloat16, device=CPU, **options):
    return choose_kernel((layer(),), dtype=dtype, device=device, **options)


@pytest.mark.parametrize(
    "changes",
    [{"dtype": torch.float32}, {"device": torch.device("meta")}, {"use_native": False}],
    ids=str,
)
def test_torch_where_native_code_does_not_fit(changes):
    assert isinstance(choose(**changes), TorchAttention)


def test_native_where_it_fits(native_kernel, native_anew):
    layers = layer(), layer(rotary=toy_rotary()), layer(rotary=toy_rotary(pairing="interleaved"))
    assert isinstance(choose_kernel(layers, dtype=torch.bfloat16, device=CPU), NativeAttention)


@pytest.mark.parametrize(
    "changes", [{"key_dim": 33}, {"rotary": toy_rotary(pairing=None)}], ids=["width", "pairing"]
)
def test_torch_for_odd_widths_and_unknown_pairings(changes):
    assert isinstance(
        choose_kernel((layer(**changes),), dtype=torch.bfloat16, device=CPU), TorchAttention
    )


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """The CPU passes for a GPU, whose kernels are interpreted."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "has_kernels", lambda device: True)
    kernels.triton_attention.cache_clear()
    yield
    kernels.triton_attention.cache_clear()


@pytest.mark.whole
def test_a_gpu_has_kernels_of_its_own(as_on_a_gpu):
    layers = layer(), layer(rotary=toy_rotary())
    kernel = choose_kernel(layers, dtype=torch.float32, device=CPU)
    assert type(kernel).__name__ == "TritonAttention"
    unknown = layer(rotary=toy_rotary(pairing=None))
    assert isinstance(choose_kernel((unknown,), dtype=torch.float32, device=CPU), TorchAttention)


@pytest.mark.parametrize("what", ["wrong", "broken"])
def test_torch_where_a_gpus_kernels_do_not_work(as_on_a_gpu, monkeypatch, caplog, what):
    from kvlinker.engines.embedded.attention.triton_attention import TritonAttention

    def attend(*_, output, **__):
        if what == "broken":
            raise RuntimeError("no such instruction")
        output.zero_()

    monkeypatch.setattr(TritonAttention, "attend", attend)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(dtype=torch.float32), TorchAttention)
    told = {"wrong": "attention by native code is wrong", "broken": "no such instruction"}
    assert told[what] in caplog.text


def test_torch_on_other_cpus(native_anew, monkeypatch, caplog):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with caplog.at_level(logging.INFO), passing_for(None):
        assert isinstance(choose(), TorchAttention)
        assert isinstance(choose(), TorchAttention)
    assert [record.message for record in caplog.records] == [
        "Attention takes PyTorch's kernels: the CPU has neither AVX2 nor NEON."
    ]


@pytest.fixture
def capable(monkeypatch):
    """The CPU passes for one that has what native code needs."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    with passing_for(TARGETS[0]):
        yield


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("/nowhere/g++", "No such file"), ("false", "false failed: no message")],
)
def test_torch_where_nothing_compiles(capable, native_anew, monkeypatch, caplog, compiler, message):
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
    assert message in caplog.text


def test_torch_where_the_cache_cannot_be_written(capable, native_anew, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert isinstance(choose(), TorchAttention)


def without_rotation(kernel, plan, key, value, slots, rotary, into, write=NativeAttention.write):
    write(kernel, plan, key, value, slots, None, into)


def keys_for_values(kernel, plan, key, value, slots, rotary, into, write=NativeAttention.write):
    write(kernel, plan, key, key, slots, rotary, into)


WRONG = {
    "attention": ("attend", lambda *_, output, **__: output.zero_()),
    "writing keys": ("write", without_rotation),
    "writing values": ("write", keys_for_values),
}


@pytest.mark.parametrize("what", WRONG)
def test_torch_where_native_code_is_wrong(native_kernel, native_anew, monkeypatch, caplog, what):
    monkeypatch.setattr(NativeAttention, *WRONG[what])
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
    assert f"{what} by native code is wrong on this machine" in caplog.text


def test_without_a_compiler_products_of_queries_and_keys_are_pytorchs(
    capable, native_anew, monkeypatch, caplog
):
    tried = []

    def missing(source, target):
        tried.append(source)
        raise NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load_library", missing)
    query, key = torch.ones(4, 3, 64).bfloat16(), torch.ones(2, 20, 64).bfloat16()
    with caplog.at_level(logging.INFO):
        assert dot_products(query, [key]) is None
        assert dot_products(query, [key]) is None
    assert len(tried) == 1, "the compiler is asked once"
    assert caplog.text.count("no compiler") == 1


def test_wrong_products_of_queries_and_keys_are_not_trusted(
    native_kernel, native_anew, monkeypatch, caplog
):
    monkeypatch.setattr(NativeDots, "multiply", lambda _, query, keys: torch.zeros(4, 3, 53))
    with caplog.at_level(logging.INFO):
        assert native_dots() is None
    assert "the product of queries and keys by native code is wrong on this machine" in caplog.text


def test_wrong_weights_of_attention_are_not_trusted(
    native_kernel, native_anew, monkeypatch, caplog
):
    monkeypatch.setattr(NativeAttention, "mean_weights", lambda *_: torch.zeros(61, 211))
    with caplog.at_level(logging.INFO):
        assert kernels.native_attention() is None
    assert "the weighing of keys by native code is wrong on this machine" in caplog.text


@pytest.fixture
def other_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


def test_native_code_is_checked_while_a_model_is_loaded_in_another_precision(
    native_anew, native_kernel, other_default_dtype
):
    assert kernels.native_attention() is not None


def test_products_are_fp32_while_a_model_is_loaded_in_another_precision(
    native_kernel, other_default_dtype
):
    query, key = (torch.randn(heads, 7, 64).bfloat16() for heads in (4, 2))
    products = dot_products(query, [key])
    assert products is not None
    assert products.dtype == torch.float32
    expected = query.float() @ key.float().repeat_interleave(2, dim=0).mT
    torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-4)


@readable
@pytest.mark.parametrize("target", ["avx512-bf16", "avx2"])
@pytest.mark.parametrize("rows", [16, 32, 48, 64])
def test_values_are_fetched_while_keys_are_scored(target, rows):
    """Compilers leave out calls that do nothing but fetch."""
    scoring = rf"10WideScoresILi{rows}EE5score|visit_blocksI8WideTileILi{rows}E"
    code = chain.from_iterable(functions("attention.cpp", target, scoring))
    assert sum("prefetch" in each for each in code) >= 2, "with and without hidden keys"
