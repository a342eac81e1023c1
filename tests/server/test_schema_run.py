"""Schemathesis asks a real server all that its OpenAPI document allows, and much that it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import kvlinker_serve

SECONDS = 120
RUN = [sys.executable, "-m", "schemathesis.cli", "run", "--seed", "1", "--mode", "all", "--phases", "coverage,fuzzing"]
EXCLUDED = "positive_data_acceptance,response_schema_conformance"
"""The first is done by ``schema_checks`` instead. The other takes an event's envelope for what our schemas describe,
its data; ``openapi_contract`` checks that."""


@pytest.mark.slow
def test_the_server_does_what_its_document_says(tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    environment = os.environ | {"KVLINKER_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    hooks = {"SCHEMATHESIS_HOOKS": "tests.server.schema_checks", "PYTHONPATH": os.pathsep.join(sys.path)}
    with kvlinker_serve([], environment) as url:
        limits = ["--max-examples", "20", "--max-time", str(SECONDS), "--request-timeout", "20"]
        command = [*RUN, *limits, "--continue-on-failure", "--exclude-checks", EXCLUDED, f"{url}/openapi.json"]
        found = subprocess.run(
            command, cwd=Path(__file__).parents[2], env=environment | hooks, capture_output=True, text=True, timeout=300
        )
    assert found.returncode == 0, found.stdout[-6000:]
