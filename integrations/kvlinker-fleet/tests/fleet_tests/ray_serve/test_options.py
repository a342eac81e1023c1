"""The options of a fleet, as the command and a configuration give them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command
from kvlinker.cli import app
from kvlinker.settings import load_settings
from kvlinker_fleet.ray_serve.options import key_of_fleet, read_options

WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import kvlinker_fleet.app, kvlinker_fleet.ray_serve.options
from kvlinker.cli import app
app(["fleet", "--port", "0"])
"""

ON_RAY = '{"tensor_parallel_size": 16, "distributed_executor_backend": "ray"}'


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"replicas": 0}, "replicas: "),
        ({"repilcas": 2}, "repilcas: "),
        ({"min_replicas": 3, "max_replicas": 2}, "it must be min_replicas (3) or more"),
        ({"target_ttft": -1}, "target_ttft: "),
    ],
)
def test_wrong_options_are_named(given: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        read_options(given)
    assert complaint in raised.value.message


def test_settings_travel_as_they_were_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets and all; what nobody set comes from the machine that a server runs on."""
    monkeypatch.setenv("KVLINKER_API_KEYS", "one,two")
    monkeypatch.setenv("KVLINKER_TENANT_QUOTAS", '{"one": {"caches": 5}}')
    settings = load_settings(state_dir=tmp_path, redis_url="redis://:hush@there:1/0")
    given = {name: getattr(settings, name) for name in settings.model_fields_set}
    options = read_options({"settings": given})
    for variable in ("KVLINKER_API_KEYS", "KVLINKER_TENANT_QUOTAS"):
        monkeypatch.delenv(variable)
    monkeypatch.setenv("KVLINKER_THREADS", "3")
    read = options.read_settings(host="10.0.0.1")
    assert read == settings.model_copy(update={"host": "10.0.0.1", "threads": 3})
    assert "hush" not in repr(options)


def test_where_tenants_have_keys_ingresses_need_an_admins() -> None:
    assert key_of_fleet(load_settings()) is None
    assert key_of_fleet(load_settings(api_keys="a", admin_keys="b,c")) == "b"
    with pytest.raises(InvalidRequestError, match="admin_keys"):
        key_of_fleet(load_settings(api_keys="a"))


REFUSED = [
    (["--replicas", "2", "--max-replicas", "3"], "--replicas is a number that stays"),
    (["--replicas", "0"], "replicas: "),
    (["--host", "0.0.0.0"], "binds to loopback only"),
    (["--address", "head:6379", "--api-keys", "a"], "needs an admin's"),
    (["--model", "none/such"], "none/such"),
    (["--engine", "vllm", "--vllm-options", ON_RAY], "leave Ray out of vllm_options"),
]


def test_what_the_command_refuses(subtests: pytest.Subtests) -> None:
    for arguments, complaint in REFUSED:
        with subtests.test(arguments=arguments):
            run = CliRunner().invoke(app, ["fleet", "--port", "0", *arguments])
            assert run.exit_code != 0
            assert complaint in " ".join(run.output.split())


def test_without_ray_the_command_names_the_extra() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 2
    assert install_command("fleet") in run.stderr
    assert "Traceback" not in run.stderr
