"""The simulated fleet: what it counts, and that the library keeps chunks where they are."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvlinker.quality.bench.harness.report import Report
from kvlinker_lab.cli import app
from kvlinker_lab.fleet import RULES, Costs, run_fleet

COSTS = Costs(link=0.06, chunk=0.045)


def simulated(*sizes: int, load: float = 0.7, costs: Costs = COSTS) -> Report:
    return run_fleet(
        sizes,
        RULES,
        costs,
        load=load,
        room=160,
        requests=300,
        report_seconds=1.0,
        seed=0,
        command="kvlinker-lab fleet …",
    )


def test_residency_keeps_most_chunks_and_the_shortest_tail() -> None:
    rows = {row["case"]: row for row in simulated(8).rows}
    best = rows["resident"]
    for rule in set(RULES) - {"resident"}:
        assert best["resident_percent"] > rows[rule]["resident_percent"] + 15
        assert best["computed_per_s"] < rows[rule]["computed_per_s"] / 1.5
        assert best["ttft_p99_ms"] < rows[rule]["ttft_p99_ms"]


def test_one_replica_makes_all_rules_alike() -> None:
    rows = [
        {name: value for name, value in row.items() if name not in ("case", "decisions_per_s")}
        for row in simulated(1).rows
    ]
    assert all(row == rows[0] for row in rows)
    assert rows[0]["ttft_p50_ms"] >= 1e3 * COSTS.link


def test_what_costs_nothing_takes_the_links_alone() -> None:
    for row in simulated(4, load=0.01, costs=Costs(link=0.06, chunk=0.0)).rows:
        assert row["ttft_p50_ms"] == pytest.approx(60)


def test_an_unknown_rule_is_named() -> None:
    run = CliRunner().invoke(app, ["fleet", "--rules", "astrology"])
    assert run.exit_code == 2
    assert "astrology" in run.output
