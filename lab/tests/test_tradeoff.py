"""What policies cost is shown over what they take."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.cli import app
from kvlinker_lab.tradeoff import join_results

POLICIES = {"full": (0.0, 2000.0), "naive": (0.25, 30.0), "slow": (0.3, 40.0), "row": (0.06, 50.0)}
"""KL, and milliseconds, by policy."""


def answers(scores: Mapping[str, float], dataset: str = "facts") -> Mapping[str, Any]:
    """Make the results of ``bench quality``: a task that is all wrong, then the mean of all."""
    rows = [
        {
            "policy": policy,
            "dataset": dataset,
            "task": task,
            "metric": metric,
            "n": 20,
            "score": score if task == "all" else 9.0,
            "ci_low": score / 2,
            "ci_high": score * 2,
        }
        for policy, score in scores.items()
        for task in ("facts-1", "all")
        for metric in ("answer_kl", "names")
    ]
    return {"command": "quality", "settings": {"model": "small"}, "results": rows}


def times(*lengths: int, model: str = "small") -> Mapping[str, Any]:
    rows = [
        {
            "policy": policy,
            "engine": engine,
            "context_tokens": length,
            "ttft_ms": taken,
            "speedup": 2000 / taken,
        }
        for length in lengths
        for policy, (_, taken) in POLICIES.items()
        for engine in ("embedded", "transformers")
    ]
    return {"command": "ttft", "settings": {"model": model}, "results": rows}


def all_answers() -> Mapping[str, Any]:
    return answers({policy: kl for policy, (kl, _) in POLICIES.items()})


def test_points_join_what_both_measured() -> None:
    points = join_results(
        [all_answers(), times(4096), answers({"row": 0.01, "other": 0.5}, "prose")]
    )
    assert [(point.dataset, point.policy, point.kl) for point in points] == [
        ("facts", "naive", 0.25),
        ("facts", "slow", 0.3),
        ("facts", "row", 0.06),
        ("facts", "full", 0.0),
        ("prose", "row", 0.01),
    ]
    row = points[2]
    assert (row.low, row.high, row.milliseconds, row.speedup, row.examples) == (
        0.03,
        0.12,
        50.0,
        40.0,
        20,
    )
    assert [point.policy for point in points if point.is_beaten(points)] == ["slow"]


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ([all_answers(), times(512, 4096)], "several lengths"),
        ([all_answers(), times(512), times(4096)], "several lengths"),
        ([all_answers(), times(4096, model="other")], "No policy"),
        ([{"command": "store", "settings": {"model": "small"}, "results": [{}]}], "neither"),
    ],
)
def test_results_that_make_no_points_are_refused(
    results: list[Mapping[str, Any]], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        join_results(results)


def test_the_command_draws_and_marks_the_frontier(tmp_path: Path) -> None:
    files = []
    for number, result in enumerate((all_answers(), times(4096))):
        files.append(tmp_path / f"{number}.json")
        files[-1].write_text(json.dumps(result))
    plot = tmp_path / "frontier.png"
    run = CliRunner().invoke(app, ["tradeoff", *map(str, files), "--plot", str(plot)])
    assert run.exit_code == 0, run.output
    assert plot.stat().st_size > 1000
    starred = {line.split("│")[3].strip() for line in run.output.splitlines() if "*" in line}
    assert starred == {"naive", "row", "full"}
