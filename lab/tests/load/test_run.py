"""Competitors under load: a tiny model behind a real server, others' servers, and the command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from lab.tests.load.conftest import Body, Serve, words
from starlette.responses import JSONResponse, Response
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError, PolicyError
from kvlinker.doors.http.app import create_app
from kvlinker.quality.bench.harness.shapes import random_model
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.settings import load_settings
from kvlinker_lab import load_benchmark
from kvlinker_lab.cli import app
from kvlinker_lab.load.driver import ClosedLoop, OpenLoop
from kvlinker_lab.load.report import ServiceObjective
from kvlinker_lab.load.run import (
    EMBEDDED,
    Competitor,
    LoadPlan,
    competing_policies,
    run_load,
)
from kvlinker_lab.load.servers import Server
from kvlinker_lab.load.traffic import TrafficShape
from tests.doors.http.serving import listening
from tests.waiting import PATIENCE

SHAPE = TrafficShape(
    library=5, chunks=3, chunk_tokens=40, fresh_tokens=12, output_tokens=(2, 4), think_seconds=0
)
CELL = ServiceObjective(60.0, 60.0)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A tiny model behind kvlinker's server, in this process."""
    loaded = random_model("tiny", dtype=torch.float32, device=torch.device("cpu"))
    subject = MeasuredModel("tiny", "kvlinker-lab load", loaded, {})
    with subject.llm(kv_slots=4000, disk_space=0) as llm:
        served = create_app(llm, llm.settings)
        with listening(served, llm.settings, closes=False) as url:
            yield Server(url, psutil.Process())


def plan(*loads: OpenLoop | ClosedLoop, shape: TrafficShape = SHAPE, requests: int = 6) -> LoadPlan:
    return LoadPlan(shape, loads, requests=requests, objective=CELL, warm_up=1, patience=60.0)


def as_context(server: Server) -> AbstractContextManager[Server]:
    return nullcontext(server)


@pytest.mark.whole
def test_every_competitor_is_measured_under_every_load(server: Server) -> None:
    policies = ["full", "plain", "naive", "legolink-4"]
    report = run_load(
        [Competitor(policy, EMBEDDED) for policy in policies],
        lambda _: as_context(server),
        plan(OpenLoop(50.0), ClosedLoop(3)),
    )
    assert [(row["policy"], row["rate"], row["users"]) for row in report.rows] == [
        (policy, *load)
        for policy in ("full", "naive", "legolink-4")
        for load in ((50.0, None), (None, 3))
    ]
    assert report.warnings == [
        "plain (embedded) is left out: the engine has no prefix cache, so that it would be measured"
        " like full."
    ]
    recomputed = {row["policy"]: row["recomputed_fraction"] for row in report.rows}
    assert recomputed["full"] == 1
    assert recomputed["naive"] == 0
    assert (
        0.05 < recomputed["legolink-4"] < 0.1
    )  # of the first chunk nothing, of two others 4 of 40
    for row in report.rows:
        assert (row["requests"], row["failed"], row["failures"]) == (6, 0, {})
        assert row["prompt_tokens"] > 3 * 40 + 12
        assert row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["latency_p99_ms"]
        assert row["goodput_per_s"] == row["requests_per_s"] > 0
        assert row["memory_mb"] > 50
        if row["policy"] == "full":
            assert row["ratio_to_full"] == 1


@pytest.mark.parametrize("kind", ["conversation", "agent"])
def test_several_turns(server: Server, kind: str) -> None:
    shape = replace(SHAPE, kind=kind, chunks=2, turns=3)
    (row,) = run_load(
        [Competitor("naive", EMBEDDED)],
        lambda _: as_context(server),
        plan(ClosedLoop(2), shape=shape, requests=5),
    ).rows
    assert (row["requests"], row["failed"]) == (6, 0)  # two whole conversations
    assert row["cached_fraction"] > 0.3


def test_what_cannot_take_part_is_left_out_and_told(server: Server) -> None:
    shape = replace(SHAPE, chunk_tokens=1400)  # three chunks are more than the pool has room for
    with pytest.raises(
        InvalidRequestError,
        match=r"naive \(embedded\) is left out: its first request failed \(status 400\)",
    ):
        run_load(
            [Competitor("naive", EMBEDDED)],
            lambda _: as_context(server),
            plan(ClosedLoop(1), shape=shape),
        )


def test_any_server_gets_plain_and_reordered_documents(serve: Serve) -> None:
    prompts: list[str] = []

    def answer(body: Body) -> Response:
        prompt = body["messages"][-1]["content"]
        if not body.get("stream"):
            return JSONResponse({"usage": {"prompt_tokens": len(prompt) // 2}})
        prompts.append(prompt)
        return words("a", "b", cached_tokens=4)

    url = serve(answer).url
    competitors = [Competitor(policy, "peer") for policy in ("plain", "reordered", "naive")]
    report = run_load(
        competitors, lambda _: nullcontext(Server(url)), plan(ClosedLoop(2), requests=12)
    )
    assert [row["policy"] for row in report.rows] == ["plain", "reordered"]
    for row in report.rows:
        assert row["cached_fraction"] == pytest.approx(0.4)
        assert (row["recomputed_fraction"], row["memory_mb"], row["ratio_to_full"]) == (
            None,
            None,
            None,
        )
    (warning,) = report.warnings
    assert warning.startswith("naive (peer) is left out:")
    assert {len(prompt) for prompt in prompts} == {2 * (3 * 40 + 12)}

    plain, reordered = prompts[:13], prompts[13:]
    beginnings = [len({prompt[:80] for prompt in sent}) for sent in (plain, reordered)]
    assert beginnings[1] < beginnings[0]
    assert {prompt[240:] for prompt in plain} == {
        prompt[240:] for prompt in reordered
    }  # the same questions


def test_policies_are_linking_policies_and_forms_of_text() -> None:
    assert competing_policies("full, plain,reordered,legolink-16,plain") == [
        "full",
        "plain",
        "reordered",
        "legolink-16",
    ]
    with pytest.raises(PolicyError, match="Unknown policy"):
        competing_policies("plains")


def test_the_command_measures_a_server_that_runs(server: Server, tmp_path: Path) -> None:
    arguments = [
        "--url",
        f"{server.url}/v1",
        "--policies",
        "full,naive",
        "--users",
        "2",
        "--rates",
        "40",
    ]
    arguments += [
        "--requests",
        "3",
        "--library",
        "4",
        "--chunks",
        "2",
        "--chunk-tokens",
        "40",
        "--output-tokens",
        "2-3",
    ]
    files = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    result = CliRunner().invoke(app, ["load", *arguments, *files])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    assert [(row["policy"], row["rate"], row["users"]) for row in content["results"]] == [
        (policy, *load) for policy in ("full", "naive") for load in ((40.0, None), (None, 2))
    ]
    assert {row["engine"] for row in content["results"]} == {server.url.removeprefix("http://")}
    assert content["settings"]["chunks"] == "2 × 40"
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
def test_the_command_starts_servers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVLINKER_CATALOG_URL", f"sqlite:///{tmp_path}/shared.sqlite")
    monkeypatch.setenv("KVLINKER_REQUIRE_CERTIFICATE", "true")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    arguments = [
        "--shape",
        "tiny",
        "--policies",
        "naive",
        "--users",
        "2",
        "--requests",
        "3",
        "--library",
        "3",
    ]
    arguments += [
        "--chunks",
        "2",
        "--chunk-tokens",
        "40",
        "--output-tokens",
        "2",
        "--json",
        str(tmp_path / "r.json"),
    ]
    result = CliRunner().invoke(app, ["load", *arguments])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "r.json").read_text())
    (row,) = content["results"]
    assert (row["policy"], row["engine"], row["failed"], row["recomputed_fraction"]) == (
        "naive",
        "embedded",
        0,
        0,
    )
    assert row["memory_mb"] > 100
    assert content["settings"]["model"] == "tiny"
    assert not (tmp_path / "shared.sqlite").exists(), "other servers' catalog is theirs"
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_servers_are_started_as_the_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, object]] = []
    monkeypatch.setattr(
        load_benchmark, "kvlinker_server", lambda _, **options: started.append(options)
    )
    start = load_benchmark.starter(load_settings(audit="10%"))
    for policy in ("full", "naive"):
        start(Competitor(policy, EMBEDDED))
    assert [(options["audit"], options["prefix_cache"]) for options in started] == [
        (0.1, "off"),
        (0.1, "on"),
    ]


@pytest.mark.whole
def test_a_command_that_is_ended_takes_its_server_along() -> None:
    command = [
        sys.executable,
        "-c",
        "from kvlinker_lab.cli import app; app()",
        "load",
        "--shape",
        "tiny",
    ]
    with subprocess.Popen(
        [*command, "--policies", "naive"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as bench:
        while not (servers := servers_of(bench.pid)):
            assert bench.poll() is None
            time.sleep(0.05)
        bench.terminate()
        assert bench.wait(60) == 128 + signal.SIGTERM
    assert not psutil.wait_procs(servers, timeout=PATIENCE)[1]


def servers_of(pid: int) -> list[psutil.Process]:
    """The servers among a process's children, which may have helpers before them."""
    servers = []
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error):  # it has ended
            if "serve" in child.cmdline():
                servers.append(child)
    return servers


@pytest.mark.whole
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        app, ["load", "--model", str(tmp_path / "none"), "--policies", "naive"]
    )
    assert result.exit_code == 2
    assert "No model at" in result.stderr


BAD_ARGUMENTS = [
    (["--policies", "blend"], "Unknown policy"),
    (["--rates", "1,x"], "not a list of numbers"),
    (["--rates", "0"], "above 0"),
    (["--users", "2,x"], "whole numbers"),
    (["--traffic", "storm"], "Unknown traffic"),
    (["--output-tokens", "many"], "no number of tokens"),
    (
        ["--url", "http://127.0.0.1:9"],
        "No OpenAI-compatible server answers at http://127.0.0.1:9",
    ),
]


def test_bad_arguments_end_with_one_clear_line(subtests: pytest.Subtests) -> None:
    for arguments, message in BAD_ARGUMENTS:
        with subtests.test(arguments=arguments):
            result = CliRunner().invoke(app, ["load", "--shape", "tiny", *arguments])
            assert result.exit_code == 2
            assert message in " ".join(result.stderr.split())
