"""A first hour goes on where a part fails, hangs or is missing, and says so."""

import json
import re
import sys
import time
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlinker_lab.cli import app
from kvlinker_lab.gpu import command, exactness, lmcache, steps
from kvlinker_lab.gpu.steps import Outcome, Step, first_hour, run

WRITES = (
    "import sys, json;"
    " json.dump({'results': [{'policy': 'naive', 'ms': 1.5}]}, open(sys.argv[1], 'w'))"
)
HANGS = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
)

HALF = "import sys; open(sys.argv[1], 'w').write('{\"resu'); raise SystemExit(1)"


def step(name, code, seconds=100.0, needs=()):
    return Step(name, (sys.executable, "-c", code), seconds, needs)


def test_steps_go_on_where_one_fails_hangs_or_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SHORTEST", 0.0)
    began = time.monotonic()
    done, failed, late, missing = run(
        [
            step("writes", WRITES),
            step("fails", "print('first'); raise SystemExit('no such kernel')"),
            step("hangs", HANGS, seconds=1.0),
            step("needs more", WRITES, needs=("sys", "no_such_package")),
        ],
        tmp_path,
        300,
    )
    assert time.monotonic() - began < 200
    assert (done.outcome, done.results) == ("done", [{"policy": "naive", "ms": 1.5}])
    assert (failed.outcome, failed.message) == ("failed", "first\nno such kernel")
    assert late.outcome == "too late"
    assert (missing.outcome, missing.message) == ("left out", "no_such_package is not installed")


@pytest.mark.parametrize("code", ["raise SystemExit('no such kernel')", HALF])
def test_a_step_has_its_own_figures_whole_or_none(code, tmp_path, monkeypatch):
    monkeypatch.setattr(steps, "SHORTEST", 0.0)
    (tmp_path / "1-naps.json").write_text('{"results": [{"policy": "another run"}]}')
    naps, writes = run([step("naps", code), step("writes", WRITES)], tmp_path, 300)
    assert naps.results == ()
    assert writes.results == [{"policy": "naive", "ms": 1.5}]


def test_no_step_begins_when_the_time_is_over(tmp_path):
    (outcome,) = run([step("writes", WRITES)], tmp_path, steps.SHORTEST / 2)
    assert (outcome.outcome, outcome.message) == ("left out", "no time was left")


@pytest.mark.parametrize("tiny", [False, True])
def test_the_steps_of_an_hour_fit_into_it_and_are_distinct(tiny):
    found = first_hour("8b", tiny=tiny)
    assert len({each.name for each in found}) == len(found)
    assert sum(each.seconds for each in found if set(each.needs) <= {"triton"}) < 30 * 60


def test_steps_in_vllm_need_the_package_that_joins_it():
    in_vllm = [each for each in first_hour("8b", tiny=False) if each.name.endswith("in vLLM")]
    assert len(in_vllm) == 3
    assert all({"vllm", "kvlinker_vllm"} == set(each.needs) for each in in_vllm)


def test_a_report_has_every_step_and_its_figures():
    outcomes = [
        Outcome(
            "ttft", "done", 12.0, "kvlinker bench ttft", "", [{"policy": "full", "ms": 600.123}]
        ),
        Outcome("load", "failed", 3.0, "kvlinker-lab load", "no such kernel"),
    ]
    told = command.report({"processor": "some"}, outcomes, {"ttft": "1-ttft.svg"})
    assert "| ttft | done | 12 |" in told
    assert "| policy | ms |\n|---|---|\n| full | 600.1 |" in told
    assert "```\nno such kernel\n```" in told
    assert "![ttft](1-ttft.svg)" in told


def test_bars_are_named_by_what_tells_them_apart(tmp_path):
    rows: list[Any] = [
        {"policy": "full", "engine": "vllm", "ttft_ms": 40.0},
        {"policy": "naive", "engine": "vllm", "ttft_ms": 5},
        {"policy": "query-5", "engine": "vllm", "ttft_ms": None},
    ]
    expected = ("time to the first token (ms)", [("full", 40.0), ("naive", 5)])
    assert command.bars_of(rows) == expected
    steps_rows = [{"case": "1 × 512", "system": name, "ms_per_step": 2.0} for name in ("a", "b")]
    assert command.bars_of(steps_rows) == ("a step of decoding (ms)", [("a", 2.0), ("b", 2.0)])
    assert command.bars_of([{"check": "link", "error": 1e-6}]) is None
    assert command.draw(rows, tmp_path / "bars.svg")
    assert "<svg" in (tmp_path / "bars.svg").read_text()


def test_what_lmcache_blends_has_the_same_chunks_in_other_orders():
    separator, prompts = [7, 7], lmcache.prompts_of(4, 3, [7, 7], 100)
    first, second = next(prompts), next(prompts)
    chunks = [
        sorted(tuple(each[at : at + 5]) for at in range(0, 20, 5)) for each in (first, second)
    ]
    assert chunks[0] == chunks[1]
    assert first[:20] != second[:20]
    assert all(list(chunk[3:]) == separator for chunk in chunks[0])
    assert len(first) == len(second) == 20 + lmcache.FRESH_TOKENS
    seen: list[Any] = []
    rows = lmcache.measure(seen.append, prompts)
    assert len(seen) == 2 + lmcache.REPEAT
    assert [row["policy"] for row in rows] == ["full, stored", "blending 15%"]


@pytest.mark.whole
def test_a_first_hour_goes_through_without_a_gpu(tmp_path):
    """What is not installed is left out; the report has figures, pictures and both."""
    ended = CliRunner().invoke(app, ["gpu", str(tmp_path / "hour"), "--tiny"])
    content = json.loads((tmp_path / "hour" / "report.json").read_text())
    outcomes = {each["name"]: each for each in content["steps"]}
    told = (tmp_path / "hour" / "report.md").read_text()
    assert ended.exit_code == 0, told
    assert {each["outcome"] for each in outcomes.values()} <= {"done", "left out"}
    for name in ("kernels", "exactness", "ttft", "decode", "load"):
        each = outcomes[name]
        assert each["results"] or each["message"] == "triton is not installed", name
        assert f"## {name}" in told
    assert {row["outcome"] for row in outcomes["exactness"]["results"]} == {"exact"}
    assert [row["policy"] for row in outcomes["ttft"]["results"]][:2] == ["full", "naive"]
    for picture in re.findall(r"!\[.*\]\((.*)\)", told):
        assert (tmp_path / "hour" / picture).stat().st_size > 0
    assert "![ttft]" in told


def test_the_command_ends_with_1_where_a_step_failed(tmp_path, monkeypatch):
    outcomes = [Outcome("kernels", "done"), Outcome("load", "failed", message="no such kernel")]
    monkeypatch.setattr(steps, "run", lambda *_: iter(outcomes))
    ended = CliRunner().invoke(app, ["gpu", str(tmp_path / "hour"), "--tiny"])
    assert ended.exit_code == 1
    content = json.loads((tmp_path / "hour" / "report.json").read_text())
    assert [each["outcome"] for each in content["steps"]] == ["done", "failed"]
    assert "no such kernel" in (tmp_path / "hour" / "report.md").read_text()


def test_what_was_tried_before_a_command_is_ended_is_reported(tmp_path, monkeypatch):
    def ended(*_):
        yield Outcome("kernels", "done", results=[{"check": "link", "error": 1e-6}])
        raise KeyboardInterrupt

    monkeypatch.setattr(steps, "run", ended)
    assert CliRunner().invoke(app, ["gpu", str(tmp_path / "hour"), "--tiny"]).exit_code != 0
    content = json.loads((tmp_path / "hour" / "report.json").read_text())
    assert [each["outcome"] for each in content["steps"]] == ["done"]
    assert "| link | 1e-06 |" in (tmp_path / "hour" / "report.md").read_text()


def test_without_a_gpu_the_way_out_is_named(tmp_path):
    ended = CliRunner().invoke(app, ["gpu", str(tmp_path / "hour")])
    assert ended.exit_code == 2
    assert "--tiny" in ended.output


def test_the_embedded_engine_is_exact(tmp_path):
    rows = exactness.main("embedded", tmp_path / "exactness.json")
    assert {row["outcome"] for row in rows} == {"exact"}
    assert json.loads((tmp_path / "exactness.json").read_text()) == {"results": rows}


@pytest.mark.whole
def test_kernels_are_tried_for_real(tmp_path):
    pytest.importorskip("triton")
    (outcome,) = run(first_hour("tiny", tiny=True)[:1], tmp_path, 300)
    assert outcome.outcome == "done", outcome.message
    assert {row["outcome"] for row in outcome.results} == {"right"}
