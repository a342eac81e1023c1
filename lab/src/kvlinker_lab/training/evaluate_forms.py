"""Measures how often the reader answers right in a form: as JSON under an enforced schema, and by
calls of tools.

Run as ``python -m kvlinker_lab.training.evaluate_forms FOLDER``. Prompts go the way of users,
through ``LLM``: passages are context caches, linked under the server's default policy. People, and
the names of tools, are ones that the reader never met.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from kvlinker.llm import LLM
from kvlinker_lab.training.calls import Desk
from kvlinker_lab.training.questions import WorldSettings
from kvlinker_lab.training.worlds import build_world

_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}}


def schema_answers(llm: LLM, count: int, words: tuple[int, int], seed: int = 0) -> int:
    """Return how many of ``count`` questions are answered right where only an enforced schema asks
    for JSON."""
    rng = random.Random(f"schemas/{seed}")
    settings = replace(WorldSettings(library_share=0), held_out=True)
    right = 0
    for _ in range(count):
        world = build_world(rng, settings.about("single"), rng.randint(*words))
        question = rng.choice([each for each in world.questions if each.kind == "single"])
        caches = llm.generate_context_cache([passage + "\n\n" for passage in world.passages])
        asked: Any = [{"role": "user", "content": [*caches, f"Question: {question.text}"]}]
        answer = llm.chat_completion(asked, response_format=_FORMAT, max_tokens=48, temperature=0)
        right += _value(answer.text) == question.answer
    return right


def tool_calls(
    llm: LLM, count: int, *, choice: Literal["auto", "required"], seed: int = 0
) -> tuple[int, int]:
    """Return how many of ``count`` questions led to the right call, and how many of these calls to
    the right answer after the result. ``choice`` is ``auto``, or ``required``, which enforces a
    call."""
    rng = random.Random(f"calls/{seed}")
    called = right = 0
    for _ in range(count):
        desk = Desk(rng, held_out=True)
        exchange = desk.exchange()
        question: Any = {"role": "user", "content": exchange.question}
        answer = llm.chat_completion(
            [question], tools=desk.tools, tool_choice=choice, max_tokens=96, temperature=0
        )
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        if calls != [(exchange.name, exchange.arguments)]:
            continue
        called += 1
        (call,) = answer.tool_calls
        function = {"name": call.name, "arguments": call.arguments}
        history: Any = [
            question,
            {
                "role": "assistant",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": exchange.returned},
        ]
        answer = llm.chat_completion(history, tools=desk.tools, max_tokens=16, temperature=0)
        right += answer.text == exchange.answer
    return called, right


def _value(text: str) -> str | None:
    try:
        value: str = json.loads(text)["answer"]
    except ValueError:
        return None
    return value


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--words", type=int, nargs=2, default=(80, 400), metavar=("MIN", "MAX"))
    arguments = parser.parse_args()
    count = arguments.count
    with tempfile.TemporaryDirectory() as state, LLM(arguments.model, state_dir=state) as llm:
        right = schema_answers(llm, count, tuple(arguments.words))
        print(f"under an enforced schema: {right} of {count} answered right")
        choices: tuple[Literal["auto", "required"], ...] = ("required", "auto")
        for choice in choices:
            called, right = tool_calls(llm, count, choice=choice)
            print(
                f"tools, {choice}: {called} of {count} called right, {right} of these answered"
                " right with the result"
            )


if __name__ == "__main__":
    main()
