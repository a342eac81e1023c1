"""Measures how often tools are called as the full computation calls them, where their definitions
are linked behind a system prompt that is another each time."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any

import httpx
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, names
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.evaluation.statistics import mean_interval
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.serving import serve_llm

Json = dict[str, Any]

COLUMNS = (
    "policy",
    "n",
    "called",
    "same_tool",
    "same_call",
    "ci_low",
    "ci_high",
    "right",
    "read",
    "recomputed",
)

FULL = "full"
POLICIES = "row,row+query-5-sensitive,row+query-15-sensitive"
OFFERED = 5
"""The tools that each request offers."""

ANSWER_TOKENS = 96
"""The most tokens of an answer, in which any of the calls fits."""

CITIES = ("Lisbon", "Oslo", "Nairobi", "Quito", "Hanoi", "Tallinn", "Perth", "Fez", "Bergen")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
PEOPLE = ("Ana Ruiz", "Bo Lindqvist", "Chidi Eze", "Dara Walsh", "Emi Tanaka", "Farid Haddad")
NUMBERS = ("3", "7", "12", "18", "25", "40", "64", "150")
FOLDERS = ("/srv/orchard", "/home/ana/tidal", "/opt/ledger", "/data/maps", "/work/beacon")
BRANCHES = ("main", "pruning", "release-3", "fix-dates", "trial")


@dataclass(frozen=True)
class Tool:
    """A tool, and the requests of users that need it."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """The meaning of each parameter, by its name."""
    request: str
    """With the parameters' names in braces, where their values stand."""
    values: Mapping[str, Sequence[str]]

    def definition(self) -> Json:
        """Return the definition as chat completions take it."""
        properties = {
            name: {"type": "string", "description": meaning}
            for name, meaning in self.parameters.items()
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        function = {"name": self.name, "description": self.description, "parameters": schema}
        return {"type": "function", "function": function}


TOOLS = (
    Tool(
        "get_forecast",
        "Look up the weather that is expected in a city. Use it whenever somebody asks whether it"
        " will rain, how warm it gets, or what to wear; it knows the next seven days.",
        {"city": "The city, as it was written.", "day": "The day of the week, in full."},
        "What will the weather be like in {city} on {day}?",
        {"city": CITIES, "day": DAYS},
    ),
    Tool(
        "find_trains",
        "List the trains between two cities on a day, with departure, arrival and price. It sells"
        " no tickets, and knows nothing of buses or flights.",
        {
            "origin": "The city where the journey begins.",
            "destination": "The city where it ends.",
            "day": "The day of the week, in full.",
        },
        "Which trains go from {origin} to {destination} on {day}?",
        {"origin": CITIES[:4], "destination": CITIES[4:], "day": DAYS},
    ),
    Tool(
        "send_message",
        "Send a short message to one person of the team by the office's own chat. The message is"
        " delivered at once and cannot be called back, so it should say exactly what was asked.",
        {"recipient": "The person's full name.", "text": "The message itself, word for word."},
        'Tell {recipient} this: "{text}"',
        {
            "recipient": PEOPLE,
            "text": (
                "The meeting is moved to noon.",
                "Your parcel has arrived.",
                "Please call the printer.",
                "The tests are green again.",
                "Lunch is at my desk.",
            ),
        },
    ),
    Tool(
        "read_file",
        "Read a text file of the repository and return its lines with their numbers. Folders are"
        " refused; use it before a file is changed, and never guess what one contains.",
        {"path": "The absolute path of the file."},
        "Show me what is in {path}.",
        {
            "path": [
                f"{folder}/{file}"
                for folder in FOLDERS
                for file in ("notes.md", "src/main.py", "settings.toml")
            ]
        },
    ),
    Tool(
        "search_text",
        "Search the files below a folder for a word and return each line that has it, with the"
        " file's name. Upper and lower case are the same; binary files are passed over.",
        {"word": "The word to look for.", "folder": "The absolute path of the folder."},
        'Where below {folder} does the word "{word}" occur?',
        {"word": ("deadline", "retry", "tide", "ledger", "lantern"), "folder": FOLDERS},
    ),
    Tool(
        "create_branch",
        "Create a branch in the repository from another one, and switch to it. It fails where a"
        " branch of that name exists, and changes no file.",
        {"name": "The new branch's name.", "base": "The branch from which it begins."},
        "Make a branch called {name} that starts from {base}.",
        {"name": ("harbour", "copper", "night-build", "smaller-cache"), "base": BRANCHES},
    ),
    Tool(
        "set_thermostat",
        "Set the temperature of a room of the house. The heating needs about half an hour to reach"
        " it, and keeps it until another one is set.",
        {"room": "The room.", "degrees": "The temperature in degrees Celsius, digits only."},
        "Please set the {room} to {degrees} degrees.",
        {
            "room": ("kitchen", "bedroom", "study", "cellar", "bathroom"),
            "degrees": ("16", "18", "19", "21", "23"),
        },
    ),
    Tool(
        "convert_amount",
        "Convert an amount of money from one currency into another at the rate of yesterday"
        " evening. It charges nothing, moves no money, and rounds to two digits.",
        {
            "amount": "The amount, digits only.",
            "source": "The currency that it is in, by its code of three letters.",
            "target": "The currency that is wanted, by its code of three letters.",
        },
        "How much are {amount} {source} in {target}?",
        {
            "amount": NUMBERS,
            "source": ("EUR", "USD", "NOK", "JPY"),
            "target": ("GBP", "CHF", "INR", "KES"),
        },
    ),
    Tool(
        "book_room",
        "Book a meeting room of the office for an hour. Rooms are named after rivers; a room that"
        " is taken is refused, and bookings can be cancelled until the evening before.",
        {
            "room": "The room's name.",
            "day": "The day of the week, in full.",
            "hour": "The hour at which it begins, from 8 to 18, digits only.",
        },
        "I need the room {room} on {day} at {hour} o'clock.",
        {
            "room": ("Danube", "Volta", "Mekong", "Tagus"),
            "day": DAYS[:5],
            "hour": ("8", "9", "11", "14", "16"),
        },
    ),
    Tool(
        "track_parcel",
        "Say where a parcel is and when it is expected. The number is on the receipt, and has two"
        " letters and six digits; parcels older than ninety days are forgotten.",
        {"number": "The parcel's number."},
        "Where is parcel {number} now?",
        {"number": ("KL204518", "QX990172", "BD316640", "TT558203", "ZR047711", "MN821935")},
    ),
    Tool(
        "open_ticket",
        "Open a ticket for the people who look after machines and software. Somebody answers within"
        " a day; urgent ones are answered within the hour.",
        {
            "title": "What is wrong, in the user's own words.",
            "urgency": "Either low, normal or urgent.",
        },
        'Open a ticket with the title "{title}". It is {urgency}.',
        {
            "title": (
                "Printer eats paper",
                "Laptop does not wake up",
                "No sound in the Volta room",
                "Password expired",
            ),
            "urgency": ("low", "normal", "urgent"),
        },
    ),
    Tool(
        "translate_text",
        "Translate a sentence into another language, keeping names and numbers as they are. Long"
        " texts should be given sentence by sentence.",
        {"text": "The sentence.", "language": "The language that is wanted, by its English name."},
        'What is "{text}" in {language}?',
        {
            "text": (
                "The tide is late today.",
                "Where is the nearest bakery?",
                "My keys are in the blue coat.",
                "We will be there by seven.",
            ),
            "language": ("Portuguese", "Norwegian", "Swahili", "Vietnamese", "Estonian"),
        },
    ),
    Tool(
        "add_reminder",
        "Remind the user of something at an hour of a day. Reminders are shown on all of the user's"
        " devices, and again ten minutes later unless they are confirmed.",
        {
            "text": "What the user wants to be reminded of.",
            "day": "The day of the week, in full.",
            "hour": "The hour, from 0 to 23, digits only.",
        },
        "Remind me on {day} at {hour} o'clock to {text}.",
        {
            "text": ("water the plants", "call the dentist", "renew the passport", "buy flour"),
            "day": DAYS,
            "hour": ("7", "10", "13", "17", "20"),
        },
    ),
    Tool(
        "count_stock",
        "Return how many pieces of an article lie in a warehouse. Articles that are on their way"
        " are not counted; for what was sold, ask for sales instead.",
        {"article": "The article's name, in the singular.", "warehouse": "The warehouse's city."},
        "How many pieces of the article {article} do we have in {warehouse}?",
        {"article": ("lantern", "anchor", "compass", "kettle", "ladder"), "warehouse": CITIES},
    ),
    Tool(
        "play_song",
        "Play a song in a room. What is playing there stops at once; the volume stays as it was,"
        " and the next songs are chosen to go with it.",
        {"title": "The song's title.", "room": "The room."},
        'Play "{title}" in the {room}.',
        {
            "title": ("Low Water", "Paper Boats", "Nine Lanterns", "The Long Way Home"),
            "room": ("kitchen", "bedroom", "study", "garden"),
        },
    ),
    Tool(
        "find_contact",
        "Look up one thing about a person in the address book. It finds people by their full name,"
        " and returns nothing for those who wished not to be listed.",
        {"name": "The person's full name.", "field": "Either phone, email or address."},
        "What is the {field} of {name}?",
        {"name": PEOPLE, "field": ("phone", "email", "address")},
    ),
)


@dataclass(frozen=True)
class Task:
    """The request of a user, and the call that it needs."""

    messages: Sequence[Json]
    tools: Sequence[Json]
    name: str
    arguments: Mapping[str, str]


def tasks(count: int, offered: int = OFFERED) -> Iterator[Task]:
    """Yield ``count`` tasks. Each has a system prompt and an order of ``offered`` tools of its
    own."""
    for number in range(count):
        rng = random.Random(number)
        needed = TOOLS[number % len(TOOLS)]
        others = rng.sample([tool for tool in TOOLS if tool is not needed], offered - 1)
        tools = rng.sample([needed, *others], offered)
        arguments = {name: rng.choice(values) for name, values in needed.values.items()}
        system = (
            f"You work in {rng.choice(FOLDERS)} on the branch {rng.choice(BRANCHES)}. Today is"
            f" {rng.choice(DAYS)}. Use the tool that fits."
        )
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": needed.request.format(**arguments)},
        ]
        yield Task(messages, [tool.definition() for tool in tools], needed.name, arguments)


@benchmark("tool-calls")
def tool_calls(
    setup: Setup,
    *,
    policies: Annotated[
        str, typer.Option(help="Policies beside full, with commas between.")
    ] = POLICIES,
    limit: Annotated[int, typer.Option(min=2, help="The number of tasks.")] = 160,
) -> Report:
    """Measure how often tools are called as with the full computation, when their definitions are
    found by implicit=structure behind another system prompt, in another order.

    ``same_call`` is the share of answers with the same calls, names and arguments, or none where
    the full computation calls none; ``right`` that of the one call that the task needs; ``read``
    that of the prompts' tokens that are not fresh.
    """
    return run_tool_calls(
        setup.subject(limit=limit), names(policies), limit=limit, progress=setup.progress
    )


def run_tool_calls(
    subject: MeasuredModel,
    policies: Sequence[str],
    *,
    limit: int,
    offered: int = OFFERED,
    progress: Progress = silent,
) -> Report:
    """Give each task to the model under ``full`` and under each policy."""
    asked = [FULL, *(policy for policy in policies if policy != FULL)]
    answers: dict[str, list[_Answer]] = {policy: [] for policy in asked}
    given = list(tasks(limit, offered))
    with subject.llm(implicit="structure") as llm, serve_llm(llm) as url:
        for begin in range(0, len(TOOLS), offered):
            progress("computing the definitions of tools")
            definitions = [tool.definition() for tool in TOOLS[begin : begin + offered]]
            _ask(url, [{"role": "user", "content": "Hello."}], definitions, asked[-1], max_tokens=1)
        llm.settle()
        for number, task in enumerate(given):
            progress("tasks", number + 1, limit)
            for policy in asked:
                answers[policy].append(_ask(url, task.messages, task.tools, policy))
    rows = [_row(policy, given, answers[policy], answers[FULL]) for policy in asked]
    return replace(subject.report(rows), columns=COLUMNS)


@dataclass(frozen=True)
class _Answer:
    calls: Sequence[tuple[str, Json]]
    """Names and arguments."""
    read: float
    """The share of the prompt's tokens that were not fresh."""
    recomputed: float

    @property
    def called(self) -> list[str]:
        return [name for name, _ in self.calls]


def _ask(
    url: str,
    messages: Sequence[Json],
    tools: Sequence[Json],
    policy: str,
    max_tokens: int = ANSWER_TOKENS,
) -> _Answer:
    body = {
        "model": "default",
        "messages": messages,
        "tools": tools,
        "temperature": 0,
        "max_tokens": max_tokens,
        "link": {"policy": policy},
    }
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=None)
    if response.is_error:
        raise InvalidRequestError(f"A task is answered {response.text}")
    answer = response.json()
    calls = answer["choices"][0]["message"].get("tool_calls") or []
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    recomputed = usage["prompt_tokens_details"].get("recomputed_tokens", 0)
    return _Answer(
        [(call["function"]["name"], _arguments(call["function"]["arguments"])) for call in calls],
        cached / usage["prompt_tokens"],
        recomputed / usage["prompt_tokens"],
    )


def _arguments(text: str) -> Any:
    """Return the arguments of a call; as they are where they were cut off."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _row(
    policy: str, given: Sequence[Task], answers: Sequence[_Answer], full: Sequence[_Answer]
) -> Row:
    pairs = list(zip(answers, full, strict=True))
    same = [float(mine.calls == theirs.calls) for mine, theirs in pairs]
    interval = mean_interval(same)
    return {
        "policy": policy,
        "n": len(answers),
        "called": fmean(bool(answer.calls) for answer in answers),
        "same_tool": fmean(mine.called == theirs.called for mine, theirs in pairs),
        "same_call": fmean(same),
        "ci_low": interval.low,
        "ci_high": interval.high,
        "right": fmean(
            answer.calls == [(task.name, task.arguments)]
            for task, answer in zip(given, answers, strict=True)
        ),
        "read": fmean(answer.read for answer in answers),
        "recomputed": fmean(answer.recomputed for answer in answers),
    }
