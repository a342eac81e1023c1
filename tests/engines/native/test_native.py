import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.attention.position_scores import native_dots
from kvlinker.engines.embedded.model.norms import native_norm
from kvlinker.engines.embedded.model.weights.native_products import native_products
from kvlinker.engines.native import NativeUnavailableError, load_library
from tests.engines.native.machine_code import functions, readable
from tests.engines.native.native_targets import HERE

SOURCE = Path(native.__file__).with_name("attention.cpp")


pytestmark = pytest.mark.skipif(
    not HERE or shutil.which("g++") is None,
    reason="native code is for CPUs with AVX2 or NEON, and needs g++",
)


def test_all_native_code_is_there():
    for loaded in (native_attention(), native_dots(), native_products(), native_norm()):
        assert loaded is not None


def test_a_source_that_does_not_compile_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(NativeUnavailableError, match=r"failed: .*error"):
        load_library(source, HERE[0])
    assert list((tmp_path / "kvlinker").iterdir()) == []


def _loads(source):
    load_library(source, HERE[0])
    return True


@pytest.mark.whole
def test_processes_build_at_the_same_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("fork")) as processes:
        assert list(processes.map(_loads, [SOURCE] * 3)) == [True] * 3
    (built,) = (tmp_path / "kvlinker").iterdir()
    before = built.stat().st_mtime_ns
    load_library(SOURCE, HERE[0])
    assert built.stat().st_mtime_ns == before


def test_a_header_that_changed_is_compiled_anew(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = Path(shutil.copy(SOURCE.with_name("call.h"), tmp_path / "call.h")).with_suffix(".cpp")
    source.write_text('#include "call.h"\n')
    load_library(source, HERE[0])
    source.with_suffix(".h").write_text("// nothing\n")
    load_library(source, HERE[0])
    assert len(list((tmp_path / "kvlinker").iterdir())) == 2


@readable
@pytest.mark.parametrize(
    ("target", "instruction", "count"),
    [
        ("avx512-bf16", "vdpbf16ps", 24),
        ("avx512-vnni", "vpdpbusd", 24),
        ("avx512-vnni", "vfmadd", 24),
        ("avx2", "vfmadd", 12),
    ],
)
def test_the_peak_is_that_of_products(target, instruction, count):
    """The compiled code is read: compilers leave out what they find to be the same."""
    code = chain.from_iterable(functions("peaks.cpp", target, ""))
    assert sum(instruction in each for each in code) == count
