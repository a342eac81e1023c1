"""Servers announce themselves in the state directory; commands find them there, and stop them."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from kvlinker.cli import app
from kvlinker.cli.running import FOLDER, RunningServer, announced, joined, running_servers
from kvlinker.llm import LLM
from kvlinker.settings import Settings, load_settings
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

runner = CliRunner()


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVLINKER_API_KEY", raising=False)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return tiny_settings(tmp_path / "state")


@pytest.fixture
def served(settings: Settings) -> Iterator[Served]:
    """A server that announces itself."""
    llm = LLM.from_model(tiny_model(), settings)
    with (
        serving(llm, settings) as running,
        announced(settings, url=running.url, model=llm.model_name),
    ):
        yield running


def files(settings: Settings) -> list[Path]:
    return list((settings.state_dir / FOLDER).iterdir())


def entered(settings: Settings, **changes: object) -> RunningServer:
    """Enter a copy of the server that runs, changed, as another process would."""
    (server,) = running_servers(settings.state_dir)
    (place,) = files(settings)
    changed = replace(server, **changes)  # type: ignore[arg-type]
    own = place.with_name(place.name.replace(f".{server.pid}.", f".{changed.pid}."))
    own.write_text(json.dumps(asdict(changed)))
    return changed


def test_the_file_is_the_owners_and_goes_with_the_server(settings: Settings) -> None:
    keyed = load_settings(**settings.model_dump() | {"api_keys": ["secret-key"]})
    with announced(keyed, url="http://127.0.0.1:1", model="tiny"):
        (place,) = files(settings)
        assert stat.S_IMODE(place.stat().st_mode) == 0o600
        assert stat.S_IMODE(place.parent.stat().st_mode) == 0o700
        assert "secret-key" not in place.read_text()
        (server,) = running_servers(settings.state_dir)
        assert (server.pid, server.url, server.keyed) == (os.getpid(), "http://127.0.0.1:1", True)
    assert files(settings) == []
    assert running_servers(settings.state_dir) == []


def test_files_of_processes_that_have_ended_are_passed_over(settings: Settings) -> None:
    with announced(settings, url="http://127.0.0.1:1", model="tiny"):
        entered(settings, started=psutil.Process().create_time() - 60)
        assert running_servers(settings.state_dir) == [], "another process had this number before"
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            pass
        (place,) = files(settings)
        place.with_name(f"{place.name.split('.')[0]}.{ended.pid}.json").write_text("{")
        assert running_servers(settings.state_dir) == []


def test_a_directory_that_cannot_be_written_is_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = tiny_settings(tmp_path / "file")
    with announced(settings, url="http://127.0.0.1:1", model="tiny"):
        assert running_servers(settings.state_dir) == []


def test_a_server_is_joined_where_it_computes_the_same(served: Served, settings: Settings) -> None:
    cases: list[tuple[dict[str, Any], str | None, bool]] = [
        ({}, None, True),
        ({"model": settings.model}, None, True),
        ({"model": "other"}, None, False),
        ({"dtype": "float32"}, None, False),
        ({"chat_template": settings.chat_template}, None, True),
        ({"threads": 1}, None, True),
        ({}, "key", False),
    ]
    for given, key, found in cases:
        with joined(load_settings(state_dir=settings.state_dir, **given), key) as server:
            assert (server is not None) == found, given


def test_a_server_that_does_not_answer_is_not_joined(settings: Settings) -> None:
    with (
        announced(settings, url="http://127.0.0.1:1", model="tiny"),
        joined(settings, None) as found,
    ):
        assert found is None


def test_documents_go_through_the_server_that_runs(
    served: Served, settings: Settings, tmp_path: Path
) -> None:
    (tmp_path / "note.txt").write_text("Tom Reyes lives in Oslo.")
    options = ["--state-dir", str(settings.state_dir)]
    result = runner.invoke(app, ["ingest", str(tmp_path / "note.txt"), *options])
    assert result.exit_code == 0, result.stderr
    assert f"by the server at {served.url}, with tiny" in result.stderr
    (cache,) = served.llm.list_caches().items
    assert cache.id in result.stdout
    found = runner.invoke(app, ["search", "Oslo", *options])
    assert cache.id in found.stdout


def test_ps(served: Served, settings: Settings) -> None:
    options = ["--state-dir", str(settings.state_dir)]
    shown = runner.invoke(app, ["ps", *options]).stdout
    assert re.search(rf"{os.getpid()} +{re.escape(served.url)} +tiny .*0 running, 0 waiting", shown)


def test_ps_of_servers_that_say_nothing(settings: Settings, tmp_path: Path) -> None:
    options = ["--state-dir", str(settings.state_dir)]
    assert "No server runs" in runner.invoke(app, ["ps", *options]).stderr
    keyed = load_settings(**settings.model_dump() | {"api_keys": ["secret-key"]})
    with announced(keyed, url="http://127.0.0.1:1", model="tiny"):
        assert "asks for a key" in runner.invoke(app, ["ps", *options]).stdout
        options += ["--api-key", "secret-key"]
        assert "server_unreachable" in runner.invoke(app, ["ps", *options]).stdout


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that a signal ends."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def test_stop(settings: Settings, sleeper: subprocess.Popen[bytes]) -> None:
    """Of several servers, those that are named; of one, that one."""
    options = ["--state-dir", str(settings.state_dir)]
    nothing = runner.invoke(app, ["stop", *options])
    assert (nothing.exit_code, "no server runs" in nothing.stderr) == (1, True)
    with announced(settings, url="http://127.0.0.1:1", model="tiny"):
        started = psutil.Process(sleeper.pid).create_time()
        entered(settings, pid=sleeper.pid, started=started)
        several = runner.invoke(app, ["stop", *options])
        assert (several.exit_code, "several servers run" in several.stderr) == (2, True)
        stranger = runner.invoke(app, ["stop", "1", *options])
        assert (stranger.exit_code, "no such server" in stranger.stderr) == (1, True)
        stopped = runner.invoke(app, ["stop", str(sleeper.pid), *options])
        assert stopped.stdout == f"{sleeper.pid} stopped\n", stopped.stderr
        assert not psutil.pid_exists(sleeper.pid)
        assert [server.pid for server in running_servers(settings.state_dir)] == [os.getpid()]
