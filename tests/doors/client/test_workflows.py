"""A workflow tells of what its agents use by how far away they are."""

from __future__ import annotations

import pytest

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.client import Workflow
from kvlinker.doors.client.workflows import MOST_STEPS


def test_what_comes_next_is_told_by_its_distance() -> None:
    flow = Workflow("f", {"plan": ["read", "search"], "read": ["write"], "search": ["write"]})
    flow.uses("plan", "cc_a")
    flow.uses("read", "cc_b", "cc_c")
    flow.uses("search", "cc_c", "cc_d")
    flow.uses("write", "cc_a")
    link = flow.link("plan", keep="answer", policy="naive")
    assert link == {
        "keep": "answer",
        "policy": "naive",
        "workflow": "f",
        "next": [
            {"ids": ["cc_b", "cc_c", "cc_d"], "steps": 1},
            {"ids": ["cc_a"], "steps": 2},
        ],
    }
    assert flow.link("write") == {"workflow": "f", "next": []}
    assert flow.ids("read") == ["cc_b", "cc_c"]


def test_loops_are_told_once() -> None:
    flow = Workflow("debate", {"one": ["two"], "two": ["one"]})
    flow.uses("one", "cc_1")
    flow.uses("two", "cc_2")
    ahead = flow.link("one")["next"]
    assert ahead == [{"ids": ["cc_2"], "steps": 1}, {"ids": ["cc_1"], "steps": 2}]


def test_hints_look_a_few_steps_ahead() -> None:
    flow = Workflow("line", {str(number): [str(number + 1)] for number in range(20)})
    for number in range(20):
        flow.uses(str(number), f"cc_{number}")
    assert len(flow.link("0")["next"]) == MOST_STEPS


def test_hints_name_no_more_than_servers_take() -> None:
    """A long run adds each of its answers; its requests are not refused for that."""
    flow = Workflow("long", {"a": ["b"], "b": ["c"], "c": ["d"]})
    flow.uses("b", *(f"cc_b{number}" for number in range(600)))
    flow.uses("c", *(f"cc_c{number}" for number in range(600)))
    flow.uses("d", "cc_d")
    near, far = flow.link("a")["next"]
    assert len(near["ids"]) == 600
    assert far == {"ids": [f"cc_c{number}" for number in range(200, 600)], "steps": 2}


def test_unknown_agents_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="no agent 'x', but 'a', 'b'"):
        Workflow("f", {"a": ["b"]}).uses("x", "cc_1")
