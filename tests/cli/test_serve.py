"""kvlinker serve, as people start it: in a process of its own, with the model in the box."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvlinker.base.errors import ModelLoadError
from kvlinker.base.loading import Loading
from kvlinker.cli import app
from kvlinker.cli.loading import shown
from kvlinker.doors.client import Client
from kvlinker.doors.http.edge.address import bind, url_of
from kvlinker.llm import LLM
from kvlinker.settings import Settings, load_settings
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.waiting import PATIENCE, wait_until

COMMAND = [sys.executable, "-c", "from kvlinker.cli import app; app()"]


@pytest.mark.whole
def test_serve(tmp_path: Path) -> None:
    """Takes a question, and stops with its chunk caches on the disk."""
    environment = os.environ | {
        "KVLINKER_STATE_DIR": str(tmp_path / "state"),
        "KVLINKER_API_KEYS": "one,two",
    }
    with subprocess.Popen(
        [*COMMAND, "serve", "--port", "0", "--policy", "naive"],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stderr is not None
        said = ""
        try:
            for line in process.stderr:
                said += line
                if address := re.search(r"http://127\.0\.0\.1:\d+", line):
                    break
            assert address, said
            assert re.search(r"policy +naive", said)
            assert str(tmp_path / "state") in said
            assert "2 API keys" in said
            assert "one" not in re.sub(r"none|http.*", "", said)
            with Client(address[0], "one") as client:
                (cache,) = client.generate_context_cache(
                    ["The kettle stands in the kitchen, and it is green."]
                )
                content = [cache, "What colour is the kettle?"]
                answer = client.chat_completion(
                    [{"role": "user", "content": content}], max_tokens=8
                )
            assert answer.usage.cached_tokens == cache.tokens
            assert httpx.get(f"{address[0]}/v1/models").status_code == 401
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=PATIENCE)
        rest = process.stderr.read()
    assert "Traceback" not in rest
    assert process.returncode == 0
    assert len(list((tmp_path / "state" / "chunks").glob("??/*.safetensors"))) == 1


@pytest.mark.whole
def test_taken_port_is_told_before_the_model_is_loaded() -> None:
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        port = url_of(listener).rsplit(":", 1)[1]
        result = subprocess.run(
            [*COMMAND, "serve", "--port", port],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
    assert result.returncode == 1
    assert "already in use" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_whose_engine_has_failed_ends_or_starts_it_again(
    restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[LLM] = []

    def start(settings: Settings, **_: object) -> LLM:
        if len(started) == 2:
            raise ModelLoadError("enough for a test")
        started.append(LLM.from_model(tiny_model(), tiny_settings(tmp_path / "state")))
        return started[-1]

    monkeypatch.setattr(LLM, "from_settings", start)
    monkeypatch.setattr(LLM, "healthy", False)
    monkeypatch.setattr(import_module("kvlinker.cli.serve"), "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(
        import_module("kvlinker.doors.http.edge.connections"), "FAILED_SECONDS", 0.0
    )
    arguments = ["serve", "--port", "0", "--on-engine-failure", "restart" if restarts else "exit"]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, len(started)) == ((1, 2) if restarts else (3, 1))
    assert ("enough for a test" if restarts else "The engine has failed") in result.stderr
    assert "Traceback" not in result.stderr


def test_an_engine_that_fails_soon_is_not_started_again_however_long_its_start_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one serves for 100 seconds, the second for 1, by a clock of the test's own."""
    clock = [0.0]
    started: list[LLM] = []

    def start(settings: Settings, **_: object) -> LLM:
        if len(started) == 2:
            raise ModelLoadError("enough for a test")
        clock[0] += 1000
        started.append(LLM.from_model(tiny_model(), tiny_settings(tmp_path / "state")))
        return started[-1]

    def healthy(llm: LLM) -> bool:
        clock[0] += 100 if len(started) == 1 else 1
        return False

    monkeypatch.setattr(LLM, "from_settings", start)
    monkeypatch.setattr(LLM, "healthy", property(healthy))
    monkeypatch.setattr(
        import_module("kvlinker.cli.serve"), "time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--on-engine-failure", "restart"])
    assert (result.exit_code, len(started)) == (3, 2)
    assert "It served for less than 60 s" in result.stderr


def test_model_that_does_not_exist(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["serve", "--port", "0", "--model", str(tmp_path / "none")])
    assert result.exit_code == 1
    assert "No model at" in result.stderr
    assert "Traceback" not in result.stderr


def test_less_room_than_chunks_may_take_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    serving = import_module("kvlinker.cli.serve")
    settings = load_settings(state_dir=tmp_path, disk_space="10GiB")
    for free, warns in ((20 << 30, False), (3 << 30, True)):
        caplog.clear()
        monkeypatch.setattr(
            serving,
            "shutil",
            SimpleNamespace(disk_usage=lambda _, free=free: SimpleNamespace(free=free)),
        )
        assert serving._free_space(settings, used=1 << 30) == free
        assert ("has only 3.0GiB free" in caplog.text) == warns


def test_a_file_gets_a_line_of_progress_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("kvlinker.cli.loading"), "LINE_SECONDS", 0.01)
    said = io.StringIO()
    loading = Loading("models/a")
    loading.report("checking", 0.25)
    with shown(loading, Console(file=said)):
        wait_until(lambda: "\n" in said.getvalue())
    assert said.getvalue().startswith("Loading models/a: checking, 40%, about ")
