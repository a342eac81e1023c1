"""The cheapest policy of each family that keeps enough of full's score."""

from __future__ import annotations

from kvlinker_lab.figures.frontier import cheapest_by_family, describe_cheapest, keeping_policies


def row(policy: str, score: float, recomputed: float) -> dict[str, object]:
    return {"policy": policy, "score": score, "recomputed_fraction": recomputed}


ROWS = [
    row("full", 0.9, 1.0),
    row("naive", 0.89, 0.0),
    row("query-2", 0.87, 0.02),
    row("query-5", 0.89, 0.05),
    row("query-15", 0.9, 0.15),
    row("legolink-1", 0.7, 0.02),
    row("cachecraft-0.3-focus", 0.885, 0.1),
]


def test_the_cheapest_that_keeps_enough() -> None:
    cheapest = cheapest_by_family(ROWS, 0.98)
    assert {family: found["policy"] for family, found in cheapest.items()} == {
        "query": "query-5",
        "cachecraft-focus": "cachecraft-0.3-focus",
    }


def test_told_from_the_cheapest_on() -> None:
    assert (
        describe_cheapest(ROWS, 0.98)
        == "query-5 (5.0% recomputed), cachecraft-0.3-focus (10.0% recomputed)"
    )
    assert describe_cheapest(ROWS[:1], 0.98) == "none"


def test_kept_in_every_task() -> None:
    easy = [entry | {"task": "easy"} for entry in ROWS]
    hard = [
        entry | {"task": "hard", "score": 0.5 if entry["policy"] == "query-5" else 0.9}
        for entry in ROWS
    ]
    assert keeping_policies(easy, 0.98) == ["naive", "query-5", "query-15", "cachecraft-0.3-focus"]
    assert keeping_policies(easy + hard, 0.98) == ["naive", "query-15", "cachecraft-0.3-focus"]
