"""Hand-overs between agents are measured for each system, with room and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.quality.bench.harness.benchmark import Setup
from kvlinker.settings import load_settings
from kvlinker_lab.agents.cases import SYSTEMS
from kvlinker_lab.agents.handovers import WAYS
from kvlinker_lab.agents.scenarios import SCENARIOS, Work
from kvlinker_lab.agents_benchmark import plot, run_agents
from kvlinker_lab.handovers_benchmark import all_tasks, run_handovers


@pytest.mark.whole
def test_answers_that_are_handed_over_need_no_computation(tmp_path: Path) -> None:
    subject = Setup(load_settings(), "tiny").subject()
    report = run_agents(subject, Work(2, 64, 16, "naive"), {"tools": SCENARIOS["tools"]})
    idle = {row["system"]: row for row in report.rows if row["store"] == "idle"}
    assert tuple(idle) == SYSTEMS
    assert idle["prefix"]["computed"] > 0.9
    assert idle["relay"]["computed"] < idle["marks"]["computed"] < 0.6
    assert idle["relay+hints"]["computed"] == pytest.approx(idle["relay"]["computed"])
    assert all(row["evicted"] == 0 for row in idle.values())
    assert idle["marks"]["vs_marks"] == idle["prefix"]["sooner"] == 1.0
    crowded = {row["system"]: row for row in report.rows if row["store"] == "crowded"}
    assert crowded["marks"]["evicted"] > 0 == crowded["marks"]["spared"]
    assert crowded["relay+hints"]["spared"] > 0
    assert crowded["relay+hints"]["computed"] < crowded["relay"]["computed"]
    plot([dict(row) for row in report.rows], tmp_path / "agents.png")
    assert (tmp_path / "agents.png").stat().st_size > 1000


def test_every_scenario_hands_over_what_was_said_before() -> None:
    for turns in SCENARIOS.values():
        assert any(turn.hears for turn in turns)
        for place, turn in enumerate(turns):
            assert all(heard < place for heard in turn.hears)
            assert all(document < 4 for document in turn.documents)


@pytest.mark.whole
def test_questions_are_asked_in_every_way_that_answers_are_handed_over() -> None:
    subject = Setup(load_settings()).subject()
    report = run_handovers(subject, "reader", limit=2, settings={})
    rows = {row["policy"]: row for row in all_tasks(report.rows)}
    assert set(rows) == {
        "full",
        *(f"{way} {policy}" for way, policies in WAYS.items() for policy in policies),
    }
    assert all(row["n"] == 2 for row in rows.values())
    assert rows["full"]["agreement"] == rows["full"]["same_answer"] == 1.0
    assert rows["relay naive"]["recomputed_fraction"] == 0.0
    shares = [rows[f"relay {name}"]["recomputed_fraction"] for name in ("query-5", "deviating-5")]
    assert shares[0] == shares[1] > 0.0
