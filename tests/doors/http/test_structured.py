"""Answers of a certain form, as OpenAI's client and vLLM's fields ask for them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.doors.http.serving import MODEL_NAME, Served
from tests.schemas import SCHEMAS, check

QUESTION: Any = [{"role": "user", "content": "Where is the cat?"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


class Place(pydantic.BaseModel):
    """Where somebody is; its schema is what the client sends."""

    room: Literal["kitchen", "garden"]
    floor: int = pydantic.Field(ge=0, le=9)
    certain: bool


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def closing(served: Served) -> dict[str, int]:
    """More weight on what ends strings and objects, which random weights seldom do."""
    return {str(token): 4 for mark in '"}],0123456789' for token in served.llm.token_ids(mark)}


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_clients_own_models_are_parsed(client: openai.OpenAI, temperature: float) -> None:
    answer = client.chat.completions.parse(
        model=MODEL_NAME,
        messages=QUESTION,
        response_format=Place,
        temperature=temperature,
        seed=1,
        max_tokens=400,
    )
    message = answer.choices[0].message
    assert isinstance(message.parsed, Place)
    assert json.loads(message.content or "") == message.parsed.model_dump()
    assert answer.choices[0].finish_reason == "stop"


def test_streams_are_of_the_form_too(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL_NAME, messages=QUESTION, response_format=Place, seed=2, max_tokens=400
    ) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Place)
    assert "".join(deltas) == final.choices[0].message.content
    assert len(deltas) > 3


def test_json_objects(served: Served, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL_NAME,
        messages=QUESTION,
        response_format={"type": "json_object"},
        logit_bias=closing(served),
        n=8,
        seed=3,
        max_tokens=300,
    )
    ended = [choice for choice in answer.choices if choice.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(choice.message.content or ""), dict) for choice in ended)


@pytest.mark.parametrize("name", ["nested", "linked list", "tagged union", "strange names"])
def test_schemas(served: Served, name: str) -> None:
    schema = SCHEMAS[name]
    body = {
        "messages": QUESTION,
        "max_tokens": 400,
        "n": 4,
        "seed": 5,
        "logit_bias": closing(served),
    }
    asked = {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": schema, "strict": True},
    }
    choices = served.post(CHAT, body | {"response_format": asked}).json()["choices"]
    ended = [choice for choice in choices if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        check(schema, json.loads(choice["message"]["content"]))


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[a-c]{2,6}!"}, "[a-c]{2,6}!"),
        ({"choice": ["positive", "negative"]}, "positive|negative"),
        ({"grammar": 'root ::= "SELECT " ("a" | "b") " FROM t"'}, "SELECT [ab] FROM t"),
        ({"grammar": 'start: "<" /[0-9]{2}/ ">"'}, "<[0-9]{2}>"),
        ({"json": {"enum": [1, 2]}}, "[12]"),
        ({"json": '{"type": "boolean"}', "regex": None}, "true|false"),
    ],
)
def test_structured_outputs(served: Served, asked: dict[str, Any], pattern: str) -> None:
    for path, prompt in ((CHAT, {"messages": QUESTION}), (TEXT, {"prompt": "The cat"})):
        answer = served.post(
            path, prompt | {"structured_outputs": asked, "max_tokens": 32, "n": 3, "seed": 1}
        ).json()
        for choice in answer["choices"]:
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert re.fullmatch(pattern, text), text
            assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("depth", [400, 900, 20_000])
def test_deep_schemas_are_refused(served: Served, depth: int) -> None:
    """Wherever one may stand; nothing runs out of stack."""
    schema = '{"items":' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {schema}}}}}'
    bodies = [
        f'"structured_outputs": {{"json": {schema}}}',
        f'"structured_outputs": {{"json": {json.dumps(schema)}}}',
        f'"response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}',
        f'"tools": [{tool}], "tool_choice": "required"',
        f'"chat_template_kwargs": {{"deep": {schema}}}',
    ]
    for body in bodies:
        content = f'{{"messages": {json.dumps(QUESTION)}, "max_tokens": 1, {body}}}'
        answer = served.http.post(
            CHAT, content=content, headers={"Content-Type": "application/json"}
        )
        assert answer.status_code == 400, (body[:40], answer.text)


def test_forms_and_context_caches_go_together(served: Served) -> None:
    (cache_id,) = served.cache("The cat sat on the mat.")
    content = [{"type": "context_cache", "id": cache_id}, {"type": "text", "text": "Where?"}]
    body = {
        "messages": [{"role": "user", "content": content}],
        "structured_outputs": {"choice": ["mat", "cat"]},
    }
    answer = served.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"] in ("mat", "cat")
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_answers_with_and_without_a_form_share_steps(served: Served) -> None:
    """A neighbour's grammar does not touch an answer."""
    plain = {"messages": QUESTION, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    alone = served.post(CHAT, plain).json()["choices"][0]["message"]["content"]
    bodies = [
        plain,
        *(
            {"messages": QUESTION, "structured_outputs": {"regex": "[ab]{20}"}, "seed": 1}
            for _ in range(3)
        ),
    ]

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            answers = [
                client.post("/chat/completions", cast_to=object, body=body) for body in bodies
            ]
            found: list[Any] = await asyncio.gather(*answers)
            return [answer["choices"][0]["message"]["content"] for answer in found]

    first, *others = asyncio.run(ask())
    assert first == alone
    assert all(re.fullmatch("[ab]{20}", text) for text in others)
