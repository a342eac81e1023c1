"""Conversations are kept for as long as their tools took before."""

from __future__ import annotations

from typing import cast

import pytest

from kvlinker.base.types.answers import AnswerPiece, Delta, Timing, Usage
from kvlinker.engines.contract.contract import Engine, Finished, GenerationEvent, GenerationRequest
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import FreshSegment, Prompt
from kvlinker.service.agents.tool_waits import FIRST_SECONDS, ToolTime, ToolWaits

FULL = parse_policy("full")


class Calls:
    """Reads an answer that is the names of tools."""

    is_over = False

    def feed(self, text: str) -> list[AnswerPiece]:
        names = text.split()
        return [AnswerPiece("call", name, f"call_{name}") for name in names]

    def finish(self, *, cut: bool) -> list[AnswerPiece]:
        return []


class Scene:
    """Requests of tenants, on a clock that stands until it is moved; notes what is expected."""

    def __init__(self, longest: float = 60.0) -> None:
        self.now = 0.0
        self.expected: list[tuple[int, float]] = []
        self.waits = ToolWaits(cast(Engine, self), longest=longest, clock=lambda: self.now)

    def expect_again(self, request: GenerationRequest, seconds: float) -> None:
        self.expected.append((len(request.prompt), seconds))

    def ask(self, *tokens: int, says: str, tenant: str = "one", reason: str = "stop") -> None:
        """Answer a prompt; returns when its tools are known to be out."""
        request = GenerationRequest(Prompt((FreshSegment(tokens),)), FULL, tenant=tenant)
        passed: list[GenerationEvent] = []
        sink = self.waits.watch(request, lambda _, event: passed.append(event), Calls)
        events: list[Delta | Finished] = [
            Delta(says, (1,)),
            Finished(reason, Usage(0, 0, 0, 0), Timing(0, 0, 0, 0)),
        ]
        for event in events:
            sink(0, event)
        assert passed == events
        self.waits._thread.submit(lambda: None).result()


def test_tools_are_learned_by_name_and_tenant() -> None:
    scene = Scene()
    scene.ask(1, 2, says="search")
    assert scene.expected == [(2, FIRST_SECONDS)]
    scene.now = 3
    scene.ask(1, 2, 3, 4, says="")
    assert scene.waits.expected("one", "search") == pytest.approx(3 + 4 * 1.5)
    assert scene.waits.expected("two", "search") == FIRST_SECONDS
    for number in range(40):
        scene.ask(5, number, says="search build")
        scene.now += 2
        scene.ask(5, number, 6, says="")
    assert scene.waits.expected("one", "search") == pytest.approx(2, abs=0.5)
    scene.ask(7, says="search other")
    assert scene.expected[-1] == (1, FIRST_SECONDS), "the longest of several tools"


def test_a_call_that_comes_back_the_next_day_is_soon_forgotten() -> None:
    scene = Scene()
    for seconds in (2.0,) * 20 + (86_400.0,) + (2.0,) * 20:
        scene.ask(1, 2, says="search")
        scene.now += seconds
        scene.ask(1, 2, 3, says="")
    assert scene.waits.expected("one", "search") < 10


def test_other_conversations_tell_nothing() -> None:
    scene = Scene()
    scene.ask(1, 2, says="search")
    scene.now = 3
    scene.ask(1, 2, says="")
    scene.ask(1, 3, 4, says="")
    scene.ask(1, 2, 3, says="", tenant="two")
    assert scene.waits.expected("one", "search") == FIRST_SECONDS


def test_nothing_is_kept_without_calls_or_time() -> None:
    scene = Scene(longest=0)
    scene.ask(1, 2, says="search")
    assert not scene.expected
    scene = Scene(longest=3)
    scene.ask(1, 2, says="")
    scene.ask(1, 2, says="search", reason="length")
    assert not scene.expected
    scene.ask(1, 2, says="search")
    assert scene.expected == [(2, 3)]
    scene.waits.close()


def test_times_that_vary_are_waited_for_longer() -> None:
    steady, varying = ToolTime(4, 2), ToolTime(4, 2)
    for number in range(60):
        steady.note(4)
        varying.note(2 if number % 2 else 6)
    assert steady.longest == pytest.approx(4, abs=0.1)
    assert varying.longest > 6
