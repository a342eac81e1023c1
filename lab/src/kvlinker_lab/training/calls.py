"""Makes conversations with tools: a user asks, the assistant calls a tool, and tells what it
returned.

Definitions, calls and results are written as kvlinker writes them for chat templates that know no
tools, which the reader's is one of.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kvlinker.base.types.messages import ChatMessage
from kvlinker.prompting.chat import Message, with_tool_section
from kvlinker_lab.training import vocabulary as words

_VERBS = ("get", "find", "show", "check", "read", "fetch", "look_up", "search")
_WEATHER = ("cold", "warm", "wet", "windy", "bright", "foggy", "dry", "mild", "grey", "calm")
_MOST_TOOLS = 3
"""The most services whose tools a request offers."""


class _Service(NamedTuple):
    """The tools about a subject, and the questions that need them."""

    noun: str
    description: str
    parameters: tuple[str, ...]
    questions: tuple[str, ...]
    """Questions with a place for each parameter."""
    result: Callable[[random.Random], str]


def _one_of(values: tuple[str, ...]) -> Callable[[random.Random], str]:
    return lambda rng: rng.choice(values)


def _number(rng: random.Random) -> str:
    return str(rng.randint(2, 99))


_SERVICES = (
    _Service(
        "weather",
        "Tells the weather in a city.",
        ("city",),
        ("What is the weather in {city}?", "How is the weather in {city} today?"),
        _one_of(_WEATHER),
    ),
    _Service(
        "time",
        "Tells what time it is in a city.",
        ("city",),
        ("What time is it in {city}?", "Tell me the time in {city}."),
        _number,
    ),
    _Service(
        "price",
        "Tells the price of a product.",
        ("product",),
        ("What is the price of {product}?", "How much do {product} cost?"),
        _number,
    ),
    _Service(
        "distance",
        "Tells the distance between two cities.",
        ("start", "end"),
        ("What is the distance from {start} to {end}?", "How far is it from {start} to {end}?"),
        _number,
    ),
    _Service(
        "stock",
        "Tells how many pieces of a product a company has.",
        ("product", "company"),
        ("How many {product} does {company} have?", "What is the stock of {product} at {company}?"),
        _number,
    ),
    _Service(
        "job",
        "Tells the job of a person.",
        ("person",),
        ("What is the job of {person}?", "What does {person} do for a living?"),
        _one_of(words.JOBS),
    ),
    _Service(
        "home",
        "Tells in which city a person lives.",
        ("person",),
        ("Where does {person} live?", "In which city does {person} live?"),
        _one_of(words.CITIES),
    ),
    _Service(
        "owner",
        "Tells who owns a company.",
        ("company",),
        ("Who owns {company}?", "Who is the owner of {company}?"),
        _one_of(words.SURNAMES),
    ),
)

_VALUES: Mapping[str, Callable[[random.Random, bool], str]] = {
    "city": lambda rng, _: rng.choice(words.CITIES),
    "start": lambda rng, _: rng.choice(words.CITIES),
    "end": lambda rng, _: rng.choice(words.CITIES),
    "product": lambda rng, _: rng.choice(words.PRODUCTS),
    "company": lambda rng, _: rng.choice(words.COMPANIES),
    "person": lambda rng, held_out: _person(rng, held_out),
}


class Exchange(NamedTuple):
    """An exchange with a tool: a question, the call, its result, and the answer."""

    question: str
    name: str
    """The tool's."""
    arguments: dict[str, str]
    returned: str
    answer: str

    @property
    def messages(self) -> list[Message]:
        """The four messages, before the call and the result are written as text."""
        called = {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}
        return [
            ChatMessage("user", (self.question,)),
            ChatMessage("assistant", (), fields={"tool_calls": [called]}),
            ChatMessage("tool", (self.returned,)),
            ChatMessage("assistant", (self.answer,)),
        ]


class Desk:
    """Holds up to three tools, and asks for what they tell. Held-out names, of tools and people,
    are in no others."""

    def __init__(self, rng: random.Random, *, held_out: bool = False) -> None:
        self._rng = rng
        self._held_out = held_out
        services = rng.sample(_SERVICES, rng.randint(1, _MOST_TOOLS))
        self._services = [(service, _name(rng, service.noun, held_out)) for service in services]

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The definitions of the tools, as clients send them."""
        return [
            {"type": "function", "function": _definition(service, name)}
            for service, name in self._services
        ]

    def exchange(self) -> Exchange:
        """Ask for what one of the tools tells."""
        rng = self._rng
        service, name = rng.choice(self._services)
        values = {
            parameter: _VALUES[parameter](rng, self._held_out) for parameter in service.parameters
        }
        answer = service.result(rng)
        returned = json.dumps({service.noun: int(answer) if answer.isdecimal() else answer})
        return Exchange(
            rng.choice(service.questions).format(**values), name, values, returned, answer
        )

    def texts(self, messages: list[Message]) -> list[tuple[str, str]]:
        """Return the roles and texts of a conversation with these tools, as the model reads
        them."""
        shown = with_tool_section(messages, self.tools)
        return [(message.role, "".join(map(str, message.content))) for message in shown]


def _definition(service: _Service, name: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in service.parameters}
    schema = {"type": "object", "properties": properties, "required": list(service.parameters)}
    return {"name": name, "description": service.description, "parameters": schema}


def _name(rng: random.Random, noun: str, held_out: bool) -> str:
    """Draw a name for a tool: a verb and the noun, in one of two styles. One in ten never occurs in
    training."""
    plain = [f"{verb}_{noun}" for verb in _VERBS]
    names = [
        *plain,
        *(
            "".join((first, *map(str.capitalize, others)))
            for first, *others in (n.split("_") for n in plain)
        ),
    ]
    return rng.choice([name for name in names if words.is_held_out(name) == held_out] or names)


def _person(rng: random.Random, held_out: bool) -> str:
    while True:
        name = f"{rng.choice((*words.WOMEN, *words.MEN))} {rng.choice(words.SURNAMES)}"
        if words.is_held_out(name) == held_out:
            return name
