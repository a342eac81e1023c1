"""Peers run the same model and are measured alike; their figures are not looked at."""

import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec

import psutil
import pytest
import torch
from gguf import GGMLQuantizationType

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.quality.bench.harness.shapes import random_model
from kvlinker.settings import load_settings
from kvlinker_lab import peers_benchmark
from kvlinker_lab.peers.peer import LinkingPeer, Task, find_peer, known_peers
from kvlinker_lab.peers.processes import is_installed, parse_pythons, run_peer
from kvlinker_lab.peers.worker import Measured, measure
from kvlinker_lab.peers_benchmark import SAME_TEXT, peers
from tests.engines.contract.test_gguf import model_of, written
from tests.toy_models import loaded_model

CASES = ["load", "prefill 40", "decode 1 × 20", "decode 3 × 20"]
LINKED_CASES = ["decode 1 × 2 × 24 shared + 8", "decode 3 × 2 × 24 shared + 8"]


def task_for(loaded, folder, **changed):
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    task = Task(
        peer="transformers",
        model=str(folder / "model"),
        folder=str(folder),
        dtype="float32",
        device="cpu",
        threads=1,
        vocabulary=loaded.model.config.vocab_size,
        kv_bytes_per_token=loaded.kv_bytes_per_token,
        prefill_tokens=40,
        batches=(1, 3),
        context_tokens=20,
        steps=4,
        chunks=2,
        chunk_tokens=24,
        fresh_tokens=8,
    )
    return replace(task, **changed)


@pytest.fixture
def task(tmp_path):
    return task_for(loaded_model("llama"), tmp_path)


def test_peers_are_measured_alike(task):
    measured = {name: measure(replace(task, peer=name)) for name in ("kvlinker", "transformers")}
    assert list(measured["kvlinker"].seconds) == CASES + LINKED_CASES
    assert list(measured["transformers"].seconds) == CASES
    for one in measured.values():
        assert min(one.seconds.values()) > 0
        assert one.peak_bytes > 2**20
    assert measured["kvlinker"].logprobs == pytest.approx(
        measured["transformers"].logprobs, abs=1e-3
    )


def test_no_chunks_no_linked_cases(task):
    assert (
        list(measure(replace(task, peer="kvlinker", chunks=0, batches=(1,))).seconds) == CASES[:3]
    )


@pytest.mark.parametrize(("name", "most"), [("kvlinker-int8", 0.05), ("kvlinker-int4", 0.3)])
@pytest.mark.whole
def test_kvlinker_runs_the_same_model_in_fewer_bits(tmp_path, name, most):
    task = task_for(
        random_model("tiny", dtype=torch.float32, device=torch.device("cpu")),
        tmp_path,
        batches=(3,),
    )
    plain, measured = (measure(replace(task, peer=peer, chunks=0)) for peer in ("kvlinker", name))
    assert list(measured.seconds) == list(plain.seconds)
    assert measured.logprobs != plain.logprobs
    assert measured.logprobs == pytest.approx(plain.logprobs, abs=most)


@pytest.mark.parametrize(
    ("name", "most"), [("llama.cpp", 1e-3), ("llama.cpp-q8_0", 0.05), ("llama.cpp-q4_0", 0.3)]
)
def test_llama_cpp_runs_the_same_model(tmp_path, name, most):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    task = task_for(
        random_model("tiny", dtype=torch.float32, device=torch.device("cpu")),
        tmp_path,
        batches=(3,),
    )
    expected = measure(task)
    measured = measure(replace(task, peer=name))
    assert list(measured.seconds) == ["load", "prefill 40", "decode 3 × 20"]
    assert measured.logprobs == pytest.approx(expected.logprobs, abs=most)


def test_peers_read_gguf_files(tmp_path):
    """kvlinker and llama.cpp the file itself, others what it was unpacked into."""
    kind = GGMLQuantizationType.Q8_0
    file = written(model_of(), tmp_path / "model.gguf", kind=kind)
    setup = Setup(load_settings(model=str(file), state_dir=tmp_path / "state"))
    options = {"batches": (1,), "context_tokens": 20, "steps": 4, "chunks": 0}
    task, _ = peers_benchmark._prepare(
        setup, tmp_path, repeat=1, prefill_tokens=40, chunk_tokens=24, policy="naive", **options
    )
    assert task.gguf == str(file)
    names = ["kvlinker", "transformers", *(["llama.cpp"] if find_spec("llama_cpp") else [])]
    first, *others = (measure(replace(task, peer=name)) for name in names)
    for other in others:
        assert first.logprobs is not None
        assert other.logprobs is not None
        assert statistics.correlation(first.logprobs, other.logprobs) > 0.99
    left_out, reasons = peers_benchmark._choose(
        [find_peer(name) for name in ("kvlinker", "llama.cpp-q4_0")],
        dict.fromkeys(("kvlinker", "llama.cpp-q4_0"), sys.executable),
        task,
    )
    assert [each.name for each in left_out] == ["kvlinker"]
    assert "llama.cpp-q4_0 is left out" in reasons[0]


def test_models_that_llama_cpp_would_run_otherwise_are_refused(tmp_path):
    pytest.importorskip("llama_cpp")
    pytest.importorskip("gguf")
    task = task_for(loaded_model("llama3-rope"), tmp_path, peer="llama.cpp")
    with pytest.raises(ModelLoadError, match="plain rotary"):
        measure(task)


@pytest.mark.whole
def test_a_process_of_its_own_answers_or_tells_why_not(task):
    measured = run_peer(task, sys.executable)
    assert list(measured.seconds) == CASES
    with pytest.raises(InvalidRequestError, match=r"transformers failed: .*nothing.* Leave it out"):
        run_peer(replace(task, model=f"{task.model}/nothing"), sys.executable)


@pytest.mark.whole
def test_a_comparison_that_is_ended_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-c", "from kvlinker_lab.cli import app; app()"]
    arguments = ["peers", "--shape", "tiny", "--systems", "transformers", "--steps", "500"]
    with subprocess.Popen(
        [*command, *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as running:
        while not (workers := _workers_of(running.pid)):
            assert running.poll() is None
            time.sleep(0.05)
        assert list(tmp_path.glob("kvlinker-bench-*"))
        running.terminate()
        assert running.wait(60) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(workers, timeout=10)[1]
    assert not list(tmp_path.glob("kvlinker-bench-*"))


def _workers_of(pid):
    children = psutil.Process(pid).children()
    return [child for child in children if "kvlinker_lab.peers.worker" in child.cmdline()]


def test_room_is_for_all_requests_of_the_largest_batch(task):
    assert task.kv_tokens(linking=True) - task.kv_tokens(linking=False) == 3 * (2 * 24 + 8 - 20)
    assert replace(task, prefill_tokens=9000).kv_tokens(linking=False) > 9000
    assert replace(task, chunks=0).longest(linking=True) == task.longest(linking=False)


def test_only_kvlinker_links():
    assert [isinstance(peer, LinkingPeer) for peer in _idle_peers()] == [True, False, False, False]


def _idle_peers():
    from kvlinker_lab.peers.linking import KVLinkerPeer
    from kvlinker_lab.peers.llama_cpp_model import LlamaCppPeer
    from kvlinker_lab.peers.transformers_model import TransformersPeer
    from kvlinker_lab.peers.vllm_engine import VLLMPeer

    return [
        object.__new__(kind) for kind in (KVLinkerPeer, LlamaCppPeer, TransformersPeer, VLLMPeer)
    ]


def test_names_and_environments_are_checked():
    assert {
        "kvlinker",
        "kvlinker-int8",
        "kvlinker-int4",
        "kvlinker-vllm",
        "vllm",
        "transformers",
        "llama.cpp",
    } <= set(known_peers())
    with pytest.raises(InvalidRequestError, match=r"Did you mean 'llama\.cpp'"):
        find_peer("lama.cpp")
    assert parse_pythons([f"vllm={sys.executable}"], {"vllm"}) == {"vllm": sys.executable}
    for option, message in (
        ("sglang=python", "one of vllm"),
        ("vllm=/nowhere/python", "/nowhere/python"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            parse_pythons([option], {"vllm"})
    assert is_installed(find_peer("transformers"), sys.executable)
    assert find_peer("kvlinker-vllm").modules == ("vllm", "kvlinker_vllm")
    assert not is_installed(
        replace(find_peer("transformers"), modules=("torch", "no_such_module")), sys.executable
    )


@pytest.fixture
def answers(monkeypatch):
    """What processes answer, by peer, one for each round; whoever has none is not installed."""
    answers: dict[str, list[Measured]] = {}

    def answer(task, python):
        return answers[task.peer].pop(0)

    monkeypatch.setattr(peers_benchmark, "run_peer", answer)
    monkeypatch.setattr(peers_benchmark, "is_installed", lambda kind, python: kind.name in answers)
    return answers


def answered(seconds, *, logprobs=(-1.0, -2.0, -4.0), megabytes=100, linked=None):
    cases = {"prefill 2048": seconds} | ({} if linked is None else {"decode linked": linked})
    return Measured(cases, megabytes * 10**6, logprobs, {"engine": "1.2"})


def run(**options):
    return peers(Setup(load_settings(), "tiny"), repeat=2, **options)


def test_rows_are_medians_beside_kvlinker(answers):
    answers["kvlinker"] = [answered(9, linked=9), answered(1, linked=2), answered(3, linked=4)]
    answers["llama.cpp"] = [answered(9), answered(8), answered(4, megabytes=50)]
    report = run(systems="llama.cpp,kvlinker,vllm")
    rows = {(row["case"], row["system"]): row for row in report.rows}
    assert rows["prefill 2048", "kvlinker"]["ms"] == 2000
    assert rows["prefill 2048", "llama.cpp"] == {
        "case": "prefill 2048",
        "system": "llama.cpp",
        "ms": 6000,
        "ratio_to_kvlinker": 3,
    }
    assert rows["decode linked", "kvlinker"]["ms"] == 3000
    assert ("decode linked", "llama.cpp") not in rows
    assert rows["peak memory", "llama.cpp"]["mb"] == 75
    assert rows[SAME_TEXT, "llama.cpp"]["correlation"] == pytest.approx(1)
    assert report.versions["engine"] == "1.2"
    assert [warning.partition(":")[0] for warning in report.warnings] == [
        "vllm is left out, for it is not installed"
    ]


def test_another_model_is_noticed(answers):
    answers["transformers"] = [answered(1)] * 3
    answers["vllm"] = [answered(1, logprobs=(-4.0, -2.0, -1.0))] * 3
    answers["kvlinker-vllm"] = [answered(1, logprobs=None)] * 3
    report = run(systems="vllm,transformers,kvlinker-vllm")
    assert [warning.partition(":")[0] for warning in report.warnings] == [
        "vllm does not run the same model"
    ]
    assert all(row.get("ratio_to_kvlinker") is None for row in report.rows)
    assert (SAME_TEXT, "kvlinker-vllm") not in {(row["case"], row["system"]) for row in report.rows}


def test_systems_that_are_missing_say_how_to_get_them(answers):
    with pytest.raises(InvalidRequestError, match=r"kvlinker-lab\[peers\].*kvlinker\[vllm\]"):
        run(systems="llama.cpp,vllm")
