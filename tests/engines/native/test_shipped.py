"""Shipped native code is used where it is there and nobody asks for another; without it and without
a compiler, the log says once what helps."""

import ctypes
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from kvlinker.engines import native
from kvlinker.engines.native import NativeUnavailableError, NoCompilerError
from kvlinker.engines.native.peaks import _Peak
from tests.engines.native.native_targets import HERE

PEAKS = {"kvlinker_peak_products": _Peak}

pytestmark = pytest.mark.skipif(
    not HERE or shutil.which("g++") is None,
    reason="native code is for CPUs with AVX2 or NEON, and needs g++",
)


@pytest.fixture(autouse=True)
def _empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SHIPPED", tmp_path / "shipped")
    yield
    native.build_here(False)


@pytest.fixture
def shipped(monkeypatch):
    """A library as a wheel has it, on a machine without a compiler."""
    built = native.load_library(Path(native.__file__).with_name("peaks.cpp"), HERE[0])
    native.SHIPPED.mkdir()
    library = Path(shutil.move(built._name, native.SHIPPED / f"{HERE[0].name}.so"))
    monkeypatch.setenv("CXX", "/nowhere/g++")
    return library


def test_what_is_shipped_is_used_without_a_compiler(shipped):
    functions = native.functions("peaks.cpp", PEAKS)
    numbers, sums = torch.ones(1024), torch.zeros(1)
    peak = _Peak(threads=1, steps=1, numbers=numbers.data_ptr(), sums=sums.data_ptr())
    functions["kvlinker_peak_products"](peak)
    assert peak.operations > 0
    assert sums > 0
    assert native.description() == f"{HERE[0].name}, shipped"


def test_build_compiles_here_what_is_shipped(shipped):
    native.build_here(True)
    with pytest.raises(NoCompilerError, match="there is no C"):
        native.functions("peaks.cpp", PEAKS)


def test_a_library_that_cannot_be_loaded_is_not_used(shipped):
    shipped.write_bytes(b"no library")
    with pytest.raises(NativeUnavailableError, match=r"invalid ELF|file too short"):
        native.functions("peaks.cpp", PEAKS)


def test_a_machine_without_compiler_is_told_once_what_helps(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/other-g++")
    assert native.description() == "none, for want of g++"
    with caplog.at_level(logging.DEBUG):
        for consequence in ("Norms are the model's own", "Attention takes PyTorch's kernels"):
            found = native.or_fall_back(partial(native.functions, "peaks.cpp", PEAKS), consequence)
            assert found is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "Install g++, or kvlinker's wheel" in record.message


def test_libraries_have_no_openmp_of_their_own(shipped):
    """Theirs would fight with torch's for the processors."""
    assert b"libgomp" not in shipped.read_bytes()
    assert b"GOMP_parallel" in shipped.read_bytes()
    assert isinstance(ctypes.CDLL(str(shipped)), ctypes.CDLL)
