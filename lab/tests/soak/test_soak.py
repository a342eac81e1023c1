"""The command: a short soak of the model in the box, and the exit code of one that finds
something."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from kvlinker.quality.bench.harness.report import ReportCheck
from kvlinker_lab import soak_benchmark
from kvlinker_lab.cli import app
from kvlinker_lab.load.endpoint import ServerFailedError
from kvlinker_lab.load.servers import Server
from kvlinker_lab.soak.clients import Tally
from kvlinker_lab.soak.plan import SoakPlan
from kvlinker_lab.soak.readings import Figures
from kvlinker_lab.soak.run import SoakResult, _Soak


@pytest.mark.whole
def test_a_short_soak_finds_nothing(tmp_path: Path) -> None:
    arguments = [
        "--minutes",
        "0.15",
        "--every",
        "1",
        "--users",
        "3",
        "--library",
        "8",
        "--chunks",
        "2",
    ]
    # a start has not filled its caches yet: what grows is left to long runs
    arguments += [
        "--growth",
        "50",
        "--aborts",
        "0.3",
        "--uploads",
        "4",
        "--host-memory",
        "4MiB",
        "--disk-space",
        "8MiB",
    ]
    files = ["--json", str(tmp_path / "soak.json"), "--plot", str(tmp_path / "soak.png")]
    result = CliRunner().invoke(app, ["soak", *arguments, *files])
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "soak.json").read_text())
    assert len(content["results"]) >= 6
    last = content["results"][-1]
    assert last["complete"] > 0
    assert last["replaced"] > 0
    assert last["failed"] == 0
    assert {check["name"]: check["passed"] for check in content["checks"]} == dict.fromkeys(
        [
            "memory_mb",
            "descriptors",
            "threads",
            "disk_mb",
            "failed requests",
            "requests counted",
            "tokens counted",
            "held by requests",
            "audit",
            "disk index",
            "kvlinker caches check",
            "deleted",
            "log",
        ],
        True,
    )
    assert (tmp_path / "soak.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.whole
def test_restarts_lose_no_request(tmp_path: Path) -> None:
    arguments = [
        "--minutes",
        "0.3",
        "--every",
        "3",
        "--restart-every",
        "6",
        "--users",
        "3",
        "--library",
        "6",
    ]
    result = CliRunner().invoke(
        app, ["soak", *arguments, "--growth", "300", "--json", str(tmp_path / "soak.json")]
    )
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "soak.json").read_text())
    last = content["results"][-1]
    assert last["restarts"] > 0
    assert last["refused"] > 0
    assert last["complete"] > 0
    assert (last["lost"], last["cut"], last["failed"]) == (0, 0, 0)
    assert {check["name"]: check["passed"] for check in content["checks"]}["restarts"]


def test_a_sample_that_fails_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clients:
        tally = Tally()

        async def send_mixed(self, seconds: float) -> None:
            await asyncio.sleep(600)

    async def figures(_: _Soak) -> Figures:
        return Figures.read("")

    async def fails(*_: object) -> None:
        raise ServerFailedError("no metrics")

    monkeypatch.setattr(_Soak, "_figures", figures)
    monkeypatch.setattr(_Soak, "_row", fails)
    plan = SoakPlan(seconds=600, every=0.01, policies=["naive"])
    nothing: Any = None
    soak = _Soak(
        Server("http://none"), nothing, cast(Any, Clients()), nothing, nothing, plan, "0", print
    )
    with pytest.raises(ServerFailedError, match="no metrics"):
        asyncio.run(soak.run())


def test_a_check_that_fails_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = SoakResult(
        [{"minutes": 1.0, "failed": 2}], [ReportCheck("failed requests", False, "2 of [many]")]
    )
    monkeypatch.setattr(
        soak_benchmark, "kvlinker_server", lambda *_, **options: nullcontext(Server("http://none"))
    )
    monkeypatch.setattr(soak_benchmark, "run_soak", lambda *_, **options: found)
    result = CliRunner().invoke(app, ["soak", "--json", str(tmp_path / "soak.json")])
    assert result.exit_code == 1
    assert "FAILED  failed requests: 2 of [many]" in result.stdout
    assert json.loads((tmp_path / "soak.json").read_text())["checks"][0]["passed"] is False
