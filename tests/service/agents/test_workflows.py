"""What a workflow will use is told to the store, or learned of what followed before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from kvlinker.base.errors import ContextCacheNotFoundError, InvalidRequestError, StoreError
from kvlinker.base.events import ChunkNamed, Event, Events, SuccessorsPredicted
from kvlinker.base.types.answers import Delta, Timing, Usage
from kvlinker.engines.contract.contract import Failed, Finished, GenerationEvent
from kvlinker.service.agents.preloading import Preloading
from kvlinker.service.agents.workflows import (
    FIRST_PACE,
    MOST_NODES,
    NextUse,
    Workflows,
    WorkflowStep,
)
from kvlinker.service.context_caches import ContextCaches
from kvlinker.store import NextUses

KEYS = "abcdef"


class Known:
    """Stands for the context caches: one for each key, whose id is its capital."""

    def usable(self, ids: Sequence[str], *, tenant: str) -> dict[str, Any]:
        for id in ids:
            if id.lower() not in KEYS:
                raise ContextCacheNotFoundError(id)
        return {id: _Cache(id.lower()) for id in ids}


class _Cache:
    def __init__(self, chunk_key: str) -> None:
        self.chunk_key = chunk_key


class Brought:
    """Stands for preloading."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.retries = 0

    def retry(self) -> None:
        self.retries += 1

    def begin(self, keys: Sequence[str], seconds: float, *, tenant: str, replaces: bool) -> int:
        self.keys += keys
        return len(keys)


class Scene:
    """Workflows of one tenant, on a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        events = Events()
        events.subscribe(self.events.append)
        self.uses = NextUses(events, lambda: self.now)
        for key in KEYS:
            self.uses.listen(ChunkNamed(key, (), "one"))
        self.brought = Brought()
        self.workflows = Workflows(
            cast(ContextCaches, Known()),
            self.uses,
            cast(Preloading, self.brought),
            events,
            lambda: self.now,
        )

    def ask(self, used: str, *following: NextUse, flow: str = "f") -> None:
        step = WorkflowStep(flow, following or None)
        expected = self.workflows.expected(step, tenant="one")
        self.workflows.begin(step, expected, used, tenant="one")


def test_a_request_leaves_room_however_it_ends() -> None:
    scene = Scene()
    told: list[GenerationEvent] = []
    sink = scene.workflows.watch(lambda _, event: told.append(event))
    finished = Finished("stop", Usage(0, 0, 4), Timing())
    ends: list[GenerationEvent] = [finished, Failed(StoreError("The disk is full."))]
    for number, event in enumerate(ends, 1):
        sink(0, Delta("a", ()))
        sink(0, event)
        assert (told[-1], scene.brought.retries) == (event, number)


def test_steps_are_told_in_the_workflows_pace() -> None:
    scene = Scene()
    scene.ask("a", NextUse(("B",), steps=2), NextUse(("C",), seconds=40))
    assert (scene.uses.due("b"), scene.uses.due("c")) == (2 * FIRST_PACE, 40)
    assert scene.brought.keys == ["b"]
    for _ in range(30):
        scene.now += 5
        scene.ask("a")
    scene.ask("a", NextUse(("B",), steps=2), NextUse(("B",), seconds=20))
    assert scene.uses.due("b") == pytest.approx(scene.now + 2 * 5, rel=0.2)
    scene.ask("b")
    assert scene.uses.due("b") == float("inf")


def test_successors_are_learned_and_told_as_long_as_it_pays() -> None:
    scene = Scene()
    for _ in range(2):
        for used in ("ab", "cd"):
            scene.ask(used)
    assert not scene.brought.keys, "nothing was foretold often enough"
    scene.ask("ba")
    assert scene.brought.keys == ["c", "d"]
    assert scene.uses.due("c") < float("inf")
    for used in ("e", "ab", "f", "ab", "d"):
        scene.ask(used)
    told = [event for event in scene.events if isinstance(event, SuccessorsPredicted)]
    assert {(event.followed, event.others) for event in told} >= {(2, 0), (0, 2)}
    scene.brought.keys.clear()
    scene.ask("ab")
    assert not scene.brought.keys, "what followed changes too often"


def test_pauses_are_no_pace() -> None:
    """A workflow of that name ran yesterday; its next run is no slower for it."""
    scene = Scene()
    scene.ask("a")
    scene.now += 86_400
    scene.ask("a", NextUse(("B",), steps=1), NextUse(("C",), steps=3))
    assert scene.uses.due("b") == scene.now + FIRST_PACE
    assert scene.uses.due("c") == scene.now + 3 * FIRST_PACE


def test_workflows_learn_apart() -> None:
    scene = Scene()
    for _ in range(4):
        scene.ask("a")
        scene.ask("e", flow="g")
        scene.ask("b")
        scene.ask("f", flow="g")
    scene.brought.keys.clear()
    scene.ask("a")
    assert scene.brought.keys == ["b"]


def test_bad_steps_are_refused() -> None:
    scene = Scene()
    with pytest.raises(InvalidRequestError) as raised:
        scene.ask("a", NextUse(("A",), steps=1), NextUse(("B", "X"), steps=1))
    assert raised.value.param == "link.next.1.ids.1"
    for name, following, message in (
        (None, [], "needs a 'workflow'"),
        ("", None, "1 to 256"),
        ("f", [{"ids": ["A"]}], "either 'steps' or 'seconds'"),
        ("f", [{"ids": ["A"], "steps": -1}], "-1, but must be from 0 to 1,000"),
        ("f", [{"ids": ["A"], "seconds": 3601}], "3601, but must be from 0 to 3,600"),
        ("f", [{"steps": 1}], "is a list such as"),
        ("f", [{"ids": ["A"], "steps": 1}] * (MOST_NODES + 1), "may have 256"),
        ("f", [{"ids": ["A"] * 501, "steps": 1}] * 2, "of 1,000"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            WorkflowStep.of(name, cast(Any, following))
    assert WorkflowStep.of(None, None) is None
    assert WorkflowStep.of("f", [{"ids": ["A"], "steps": 1}]) == WorkflowStep(
        "f", (NextUse(("A",), steps=1),)
    )


NO_STEPS: list[tuple[Any, Any, str]] = [
    (5, None, "a text"),
    ("f", [{"ids": "cc_abc", "steps": 1}], "is a list such as"),
    ("f", [{"ids": [5], "steps": 1}], "is a list such as"),
    ("f", [{"ids": ["cc_a"], "steps": 1, "second": 2}], "is a list such as"),
    ("f", [{"ids": ["cc_a"], "steps": 1.5}], "'steps' of 'next' is 1.5"),
    ("f", [{"ids": ["cc_a"], "steps": True}], "'steps' of 'next' is True"),
    ("f", [{"ids": ["cc_a"], "steps": "1"}], "'steps' of 'next' is '1'"),
    ("f", [{"ids": ["cc_a"], "seconds": float("nan")}], "'seconds' of 'next' is nan"),
]


def test_the_library_names_what_is_none(subtests: pytest.Subtests) -> None:
    for name, following, says in NO_STEPS:
        with subtests.test(following=following), pytest.raises(InvalidRequestError, match=says):
            WorkflowStep.of(name, following)
