"""Options come from the settings: all of them, with the right order of precedence, and clear
complaints."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvlinker.cli import app
from kvlinker.cli.options import _PANELS, settings_options
from kvlinker.engines.contract.joining import is_installed
from kvlinker.quality import bench
from kvlinker.quality.bench.harness import benchmark
from kvlinker.quality.bench.harness.benchmark import compared_policies
from kvlinker.settings import CONFIG_FILE_VARIABLE, Settings, load_settings

runner = CliRunner()


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--config`` sets the variable; put it back afterwards."""
    monkeypatch.setenv(CONFIG_FILE_VARIABLE, "")


@pytest.fixture
def probe() -> typer.Typer:
    """A command that prints its settings."""
    probing = typer.Typer()

    @probing.command()
    @settings_options(*Settings.model_fields)
    def show(settings: Settings) -> None:
        print(f"port={settings.port} policy={settings.policy} memory={int(settings.host_memory)}")
        print(
            f"dir={settings.state_dir} remote={settings.trust_remote_code}"
            f" keys={','.join(settings.api_keys)}"
        )

    return probing


def test_every_setting_is_an_option() -> None:
    shown = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    for name, field in Settings.model_fields.items():
        is_shown = name != "vllm_options" or is_installed("vllm")
        assert (f"--{name.replace('_', '-')}" in shown) == is_shown
        assert (f"KVLINKER_{name.upper()}" in shown) == is_shown
        assert field.description


def test_options_are_shown_by_subject_the_common_ones_first() -> None:
    shown = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).output
    titles = re.findall(r"─ (\w[\w ]*) ─", shown)
    assert titles == [
        *("Options", "Common", "Model and answers", "Linking", "Engine", "Store", "Fleet", "Audit"),
        "Server",
    ]
    assert shown.index("--model ") < shown.index("--port ") < shown.index("--strict ")


def test_headings_are_those_above_the_settings() -> None:
    """``_PANELS`` names the first setting under each heading: another one may have moved there."""
    source = inspect.getsource(Settings)
    above = re.findall(r"^    # (.+)\n\n    (\w+):", source, re.MULTILINE)
    assert {name: heading for heading, name in above} == _PANELS


def test_unknown_commands_suggest(subtests: pytest.Subtests) -> None:
    for words, near in ((["serv"], "serve"), (["caches", "rmm"], "rm"), (["bench", "tft"], "ttft")):
        with subtests.test(" ".join(words)):
            result = runner.invoke(app, words, env={"COLUMNS": "200"})
            assert result.exit_code == 2
            assert f"Did you mean '{near}'" in result.output


def test_options_reach_the_settings(probe: typer.Typer) -> None:
    arguments = [
        "--port",
        "9000",
        "--policy",
        "naive",
        "--host-memory",
        "2GiB",
        "--state-dir",
        "/tmp/somewhere",
    ]
    result = runner.invoke(probe, [*arguments, "--trust-remote-code", "--api-keys", "one, two"])
    assert result.output.splitlines() == [
        f"port=9000 policy=naive memory={2 * 2**30}",
        "dir=/tmp/somewhere remote=True keys=one,two",
    ]


def test_options_win_over_variables_over_file(probe: typer.Typer, tmp_path: Path) -> None:
    config = tmp_path / "kvlinker.toml"
    config.write_text('port = 1111\npolicy = "full"\nhost_memory = "1MiB"\n')
    result = runner.invoke(
        probe,
        ["--config", str(config), "--port", "3333"],
        env={"KVLINKER_PORT": "2222", "KVLINKER_POLICY": "naive"},
    )
    assert result.output.startswith(f"port=3333 policy=naive memory={2**20}\n")


BAD_USAGE = [
    (["--port", "99999"], "--port"),
    (["--port", "web"], "--port"),
    (["--policy", "wishful"], "Unknown policy 'wishful'"),
    (["--policy", "legolink-0"], "legolink-0"),
    (
        ["--dtype", "flaot32"],
        "from option --dtype): it must be 'auto', 'float32', 'bfloat16' or 'float16'. Did you",
    ),
    (["--engine", "steam"], "--engine"),
    (["--max-model-len", "1"], "--max-model-len"),
    (["--host-memory", "much"], "--host-memory"),
    (["--host", "0.0.0.0"], "loopback"),
]


def test_bad_usage_is_one_line(subtests: pytest.Subtests) -> None:
    for arguments, complaint in BAD_USAGE:
        with subtests.test(" ".join(arguments)):
            result = runner.invoke(app, ["serve", *arguments])
            assert result.exit_code == 2
            assert result.stdout == ""
            assert complaint in result.stderr
            assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["serve", "--nonsense"], ["nonsense"], ["ingest"], ["serve", "--config", "no"]]
)
def test_what_typer_refuses(arguments: list[str]) -> None:
    assert runner.invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [("port = ", "not valid TOML"), ("prt = 5", "kvlinker.toml). Did you mean 'port'?")],
)
def test_bad_files(tmp_path: Path, content: str, complaint: str) -> None:
    config = tmp_path / "kvlinker.toml"
    config.write_text(content)
    result = runner.invoke(app, ["serve", "--config", str(config)])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert complaint in result.stderr


@pytest.mark.parametrize("command", ["serve", "ingest .", "check model", "caches ls", "bench ttft"])
def test_bad_variables_are_bad_usage_of_every_command(command: str) -> None:
    result = runner.invoke(app, command.split(), env={"KVLINKER_DTYPE": "flaot32"})
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "dtype is 'flaot32' (from variable KVLINKER_DTYPE): it must be" in result.stderr


def test_missing_file_of_the_variable(tmp_path: Path) -> None:
    result = runner.invoke(app, ["serve"], env={CONFIG_FILE_VARIABLE: str(tmp_path / "none.toml")})
    assert result.exit_code == 2
    assert "none.toml" in result.stderr


def test_version() -> None:
    assert re.fullmatch(r"\d+\.\d+.*\n", runner.invoke(app, ["--version"]).output)


def test_commands_start_without_torch() -> None:
    """The help of every command, too: modules that are heavy are imported when a command runs."""
    code = """
import contextlib, io, sys
from kvlinker.cli import app
from kvlinker.quality.bench.harness.benchmark import declared_benchmarks
benchmarks = [f"bench {name}" for name in declared_benchmarks()]
for command in ("", "serve", "ingest", "caches ls", "calibrate", "bench", *benchmarks):
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        app([*command.split(), "--help"])
    assert "Usage" in shown.getvalue()
heavy = {"torch", "transformers", "fastapi", "matplotlib", "sentencex", "scipy", "kvlinker.llm",
         "kvlinker.store"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_benchmark_takes_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a command with the settings that it names, and found among the modules of its
    folder."""
    (tmp_path / "nap.py").write_text('''"""Measures how long a nap takes."""

from kvlinker.quality.bench.harness.benchmark import Setup, benchmark


@benchmark("nap", settings=("threads",))
def nap(setup: Setup, *, minutes: int = 20) -> None:
    """Measure a nap."""
    print(f"{minutes} minutes with {setup.settings.threads} threads")
    raise SystemExit
''')
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    monkeypatch.setattr(benchmark._registry, "_values", dict(benchmark._registry._values))
    benchmark.declared_benchmarks.cache_clear()
    try:
        listed = runner.invoke(app, ["bench", "--help"])
        result = runner.invoke(app, ["bench", "nap", "--minutes", "5", "--threads", "2"])
    finally:
        benchmark.declared_benchmarks.cache_clear()
        sys.modules.pop("kvlinker.quality.bench.nap", None)
    assert "Measure a nap." in listed.output
    assert result.stdout == "5 minutes with 2 threads\n"


@pytest.mark.parametrize(
    ("policy", "text", "names"),
    [
        ("query-5", None, "full naive query-5 legolink-16 attnlink-16 random-15"),
        ("legolink-16", None, "full naive legolink-16 attnlink-16 random-15"),
        (
            "row+query-5",
            None,
            "full naive row+query-5 row query-5 legolink-16 attnlink-16 random-15",
        ),
        ("query-5", "naive, legolink-2,naive", "naive legolink-2"),
    ],
)
def test_benchmarks_compare_the_policy_in_force(policy: str, text: str | None, names: str) -> None:
    assert " ".join(compared_policies(text, load_settings(policy=policy))) == names
