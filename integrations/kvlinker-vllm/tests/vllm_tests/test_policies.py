"""What vLLM cannot follow, ``kvlinker policies`` says."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from kvlinker.cli import app

runner = CliRunner()


def test_policies_that_the_engine_cannot_follow_say_so() -> None:
    listed = json.loads(runner.invoke(app, ["policies", "--json", "--engine", "vllm"]).output)
    supported = {
        policy["name"]: (policy["supported"], policy["restriction"] is None) for policy in listed
    }
    assert supported["legolink"] == supported["h2o"] == supported["query"] == (True, True)
    assert supported["cacheblend-auto"] == (False, False)
    assert supported["cacheblend"] == supported["cachecraft"] == (True, False)
    (auto,) = (policy["restriction"] for policy in listed if policy["name"] == "cacheblend-auto")
    assert "a forecast" in auto
    shown = runner.invoke(app, ["policies", "--engine", "vllm"], env={"COLUMNS": "400"}).output
    assert "which the vllm engine does not offer" in shown
