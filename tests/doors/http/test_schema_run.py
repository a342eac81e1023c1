"""Schemathesis asks a real server all that its OpenAPI document allows, and much that it does
not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import kvlinker_serve

EXAMPLES = 10
"""Of each operation and kind of data, besides those that follow from its schema one by one."""

EXCLUDED = "positive_data_acceptance,response_schema_conformance"
"""The first knows no 400 for fields that do not go together, which schemas do not describe. The
other takes an event's envelope for what our schemas describe, its data; ``openapi_contract`` checks
that."""

REPEATABLE = ["--generation-deterministic", "--no-shrink"]
PATIENT = ["--request-timeout", "300", "--suppress-health-check", "all"]
"""So that a busy machine makes the run slow, and nothing else."""

CONFIGURATION = """
[checks.negative_data_rejection]
expected-statuses = [400, 404, 405, 413]
"""
"""413 is for lists that are longer than allowed, and so the whole body."""


@pytest.mark.whole
def test_the_server_does_what_its_document_says(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    configuration = tmp_path / "schemathesis.toml"
    configuration.write_text(CONFIGURATION)
    environment = os.environ | {
        "KVLINKER_STATE_DIR": str(tmp_path / "state"),
        "OMP_NUM_THREADS": "1",
    }
    hooks = {
        "SCHEMATHESIS_HOOKS": "tests.doors.http.schema_checks",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    program = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run"]
    extent = ["--mode", "all", "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
    asked = ["--continue-on-failure", "--exclude-checks", EXCLUDED, *extent, *REPEATABLE, *PATIENT]
    with kvlinker_serve([], environment) as url:
        found = subprocess.run(
            [*program, *asked, f"{url}/openapi.json"],
            cwd=Path(__file__).parents[2],
            env=environment | hooks,
            capture_output=True,
            text=True,
        )
    shown = [line[:400] for line in (found.stdout + found.stderr).splitlines()]  # bodies are long
    assert found.returncode == 0, "\n".join(shown[-200:])
