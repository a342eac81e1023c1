"""Conversations with tools: calls fit the definitions, answers are what was returned, and held-out
names are apart."""

from __future__ import annotations

import json
import random
import re

import pytest
from jsonschema import validate

from kvlinker_lab.training import vocabulary as words
from kvlinker_lab.training.calls import Desk


@pytest.mark.parametrize("held_out", [False, True])
def test_calls_fit_their_definitions(held_out: bool) -> None:
    for seed in range(50):
        desk = Desk(random.Random(seed), held_out=held_out)
        tools = {tool["function"]["name"]: tool["function"] for tool in desk.tools}
        exchange = desk.exchange()
        validate(exchange.arguments, tools[exchange.name]["parameters"])
        assert all(value in exchange.question for value in exchange.arguments.values())
        assert [str(value) for value in json.loads(exchange.returned).values()] == [exchange.answer]
        for person in re.findall(r"[A-Z]\w+ [A-Z]\w+", str(exchange.arguments.get("person", ""))):
            assert words.is_held_out(person) == held_out


def test_a_model_reads_calls_and_results_as_text() -> None:
    desk = Desk(random.Random(1))
    exchange = desk.exchange()
    (asked, question), (calling, call), (told, result), (answering, answer) = desk.texts(
        exchange.messages
    )
    assert (asked, calling, told, answering) == ("user", "assistant", "user", "assistant")
    assert question.endswith(exchange.question)
    assert all(json.dumps(tool["function"]) in question for tool in desk.tools)
    assert (
        json.loads(call.removeprefix("<tool_call>").removesuffix("</tool_call>"))["name"]
        == exchange.name
    )
    assert exchange.returned in result
    assert answer == exchange.answer
