"""The SDKs' own types hold strictly for the answers and events of every route, calls that were cut
included, and a field that is wrong would be noticed. vLLM's tests run most of these, too."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import anthropic.types
import openai.types
import pytest
from openai.types.shared import ErrorObject
from pydantic import TypeAdapter, ValidationError

from kvlinker.base.errors import EngineClosedError, KVLinkerError
from tests.doors.http.dialects import CHAT, DIALECTS, MESSAGES, RESPONSES
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MODEL_NAME, Served
from tests.doors.http.test_calls import ONE, dialects, marked  # noqa: F401
from tests.doors.http.test_tools import WEATHER

WRONG: Any = {"not": "what it is"}

FREE = {
    # kvlinker's own, or vLLM's
    "prompt_token_ids",
    "prompt_logprobs",
    "choices.token_ids",
    "choices.prompt_logprobs",
    "choices.prompt_token_ids",
    "choices.message.reasoning",
    "choices.message.reasoning_content",
    "usage.prompt_tokens_details.exact_cached_tokens",
    "usage.prompt_tokens_details.recomputed_tokens",
    "usage.prompt_tokens_details.reusable_tokens",
    "usage.input_tokens_details.exact_cached_tokens",
    "usage.input_tokens_details.recomputed_tokens",
    "usage.input_tokens_details.reusable_tokens",
    # of which the clients' types say nothing, or that any object is one
    "choices.logprobs",
    "content.input",
    "incomplete_details",
    "name",
    "store",
    "tools.parameters",
}
"""Fields that the clients' types take with any value."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that is neither a list nor an object in a JSON value."""
    if isinstance(value, dict | list):
        for name in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[name], (*path, name))
    else:
        yield path


def unnoticed(told: Any, kind: TypeAdapter[Any]) -> set[str]:
    """The fields, numbers of entries left out, that may be anything for the client's type."""
    kind.validate_json(json.dumps(told), strict=True)
    found = set()
    for path in places(told):
        changed = copy.deepcopy(told)
        *outer, last = path
        inner = changed
        for name in outer:
            inner = inner[name]
        inner[last] = WRONG
        try:
            kind.validate_json(json.dumps(changed), strict=True)
        except ValidationError:
            continue
        found.add(re.sub(r"\.\d+", "", ".".join(map(str, path))).removeprefix("response."))
    return {name for name in found if not any(name == free or name.startswith(f"{free}.")
                                              for free in FREE)}  # fmt: skip


@pytest.mark.whole
@dialects
def test_answers_and_events_are_of_the_clients_types(
    marked: Served,  # noqa: F811
    dialect: str,
) -> None:
    api = DIALECTS[dialect]
    for asked in (ONE, replace(ONE, max_tokens=40), replace(ONE, choice="auto", max_tokens=3)):
        body = api.body(asked)
        assert unnoticed(marked.post(api.path, body).json(), api.answer) == set()
        stream = marked.post(api.path, body | {"stream": True}).text
        events = [json.loads(each) for each in re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)]
        kinds = {event.get("type") or str([sorted(choice["delta"]) for choice in event["choices"]]):
                 event for event in events}  # fmt: skip
        for event in kinds.values():
            assert unnoticed(event, api.event) == set()


def test_other_answers_are_of_the_clients_types(marked: Served) -> None:  # noqa: F811
    text = marked.post("/v1/completions", {"prompt": "a", "max_tokens": 2, "logprobs": 1}).json()
    told = unnoticed(text, TypeAdapter(openai.types.Completion))
    assert {name for name in told if "top_logprobs" not in name} == set()
    count = marked.post("/v1/messages/count_tokens", {"messages": MESSAGES.body(ONE)["messages"]})
    kind = TypeAdapter(anthropic.types.MessageTokensCount)
    assert unnoticed(count.json(), kind) == set()
    for model in (
        marked.get(f"/v1/models/{MODEL_NAME}").json(),
        *marked.get("/v1/models").json()["data"],
    ):
        told = unnoticed(model, TypeAdapter(openai.types.Model))
        assert told == {"context_window", "max_model_len"} & model.keys()


@pytest.mark.parametrize("path", [CHAT.path, RESPONSES.path, "/v1/completions"])
def test_errors_are_of_openais_type(marked: Served, path: str) -> None:  # noqa: F811
    told = marked.post(path, {"model": "other"}).json()
    assert unnoticed(told["error"], TypeAdapter(ErrorObject)) == set()


@pytest.mark.whole
def test_failures_half_way_are_of_the_clients_types(
    faked: Served, engine: FakeEngine, subtests: pytest.Subtests
) -> None:
    failures = (KVLinkerError("broken"), EngineClosedError("closed"))
    for dialect, failure in product(DIALECTS, failures):
        with subtests.test(dialect, failure=failure.code):
            engine.fails_at, engine.failure = 1, failure
            api = DIALECTS[dialect]
            body = api.body(replace(ONE, choice="auto", tools=[WEATHER], max_tokens=50))
            stream = faked.post(api.path, body | {"stream": True}).text
            *events, last = re.findall(r"^data: (\{.*)$", stream, re.MULTILINE)
            for event in events:
                assert unnoticed(json.loads(event), api.event) == set()
            told = json.loads(last)
            match dialect:
                case "chat":
                    assert unnoticed(told["error"], TypeAdapter(ErrorObject)) == set()
                case "messages":
                    assert unnoticed(told, TypeAdapter(anthropic.types.ErrorResponse)) == set()
                case _:
                    assert unnoticed(told, api.event) == set()
                    assert told["response"]["error"]["type"] == failure.code


def test_errors_are_of_anthropics_type(marked: Served) -> None:  # noqa: F811
    told = marked.post(MESSAGES.path, {"model": "other"}).json()
    assert unnoticed(told, TypeAdapter(anthropic.types.ErrorResponse)) == set()
