"""Hand-overs between agents are measured for each system, with room and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlinker.quality.bench.harness.subject import make_subject
from kvlinker.settings import load_settings
from kvlinker_lab import agents_benchmark
from kvlinker_lab.agents_benchmark import SCENARIOS, SYSTEMS, Work, plot, run_agents


@pytest.mark.slow
def test_answers_that_are_handed_over_need_no_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents_benchmark, "SCENARIOS", {"tools": SCENARIOS["tools"]})
    subject = make_subject(load_settings(), shape="tiny", command="test")
    report = run_agents(subject, Work(2, 64, 16, 0.0, "naive"))
    idle = {row["system"]: row for row in report.rows if row["store"] == "idle"}
    assert tuple(idle) == SYSTEMS
    assert idle["prefix"]["recomputed"] > 0.9
    assert idle["relay"]["recomputed"] < idle["marks"]["recomputed"] < 0.6
    assert idle["relay+hints"]["recomputed"] == pytest.approx(idle["relay"]["recomputed"])
    crowded = {row["system"]: row for row in report.rows if row["store"] == "crowded"}
    assert crowded["marks"]["evicted"] > 0 == crowded["marks"]["spared"]
    assert crowded["relay+hints"]["spared"] > 0
    plot([dict(row) for row in report.rows], tmp_path / "agents.png")
    assert (tmp_path / "agents.png").stat().st_size > 1000


def test_every_scenario_hands_over_what_was_said_before() -> None:
    for turns in SCENARIOS.values():
        assert any(turn.hears for turn in turns)
        for place, turn in enumerate(turns):
            assert all(heard < place for heard in turn.hears)
            assert all(document < 4 for document in turn.documents)
