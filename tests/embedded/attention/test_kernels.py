import logging

import pytest
import torch

from kvlinker.embedded.attention import kernels
from kvlinker.embedded.attention.kernels import choose_kernel
from kvlinker.embedded.attention.native_kernel import NativeAttention, _library
from kvlinker.embedded.attention.torch_kernels import TorchAttention
from kvlinker.embedded.model.anatomy import LayerShape
from kvlinker.embedded.native import NativeUnavailableError
from tests.embedded.toy_rotary import toy_rotary

CPU = torch.device("cpu")


@pytest.fixture
def native_kernel():
    try:
        return NativeAttention()
    except NativeUnavailableError as error:
        pytest.skip(f"no native attention: {error}")


@pytest.fixture
def chosen_anew():
    """The choice between kernels is remembered; forget it before and after."""
    kernels._native_or_torch.cache_clear()
    _library.cache_clear()
    yield
    kernels._native_or_torch.cache_clear()
    _library.cache_clear()


def choose(*, dtype=torch.bfloat16, device=CPU, **options):
    return choose_kernel((), dtype=dtype, device=device, **options)


@pytest.mark.parametrize(
    "changes", [{"dtype": torch.float32}, {"device": torch.device("cuda")}, {"use_native": False}], ids=str
)
def test_torch_where_native_code_does_not_fit(changes):
    assert isinstance(choose(**changes), TorchAttention)


def layer(**changes):
    return LayerShape(**{"query_heads": 1, "kv_heads": 1, "key_dim": 64, "value_dim": 64, "rotary": None} | changes)


def test_native_where_it_fits(native_kernel, chosen_anew):
    layers = layer(), layer(rotary=toy_rotary()), layer(rotary=toy_rotary(pairing="interleaved"))
    assert isinstance(choose_kernel(layers, dtype=torch.bfloat16, device=CPU), NativeAttention)


@pytest.mark.parametrize("changes", [{"key_dim": 33}, {"rotary": toy_rotary(pairing=None)}], ids=["width", "pairing"])
def test_torch_for_odd_widths_and_unknown_pairings(changes):
    assert isinstance(choose_kernel((layer(**changes),), dtype=torch.bfloat16, device=CPU), TorchAttention)


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


def test_torch_where_native_code_is_wrong(native_kernel, chosen_anew, monkeypatch, caplog):
    monkeypatch.setattr(NativeAttention, "attend", lambda *_, output, **__: output.zero_())
    with caplog.at_level(logging.INFO):
        assert isinstance(choose(), TorchAttention)
    assert "wrong on this machine" in caplog.text
