"""Bodies are read before somebody else does, and answers are added to on their way."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Message

from kvlinker_vllm.server.forwarding import AnswerEditor, read_body, replay_body, with_length
from kvlinker_vllm.server.route_override import is_linked

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"application/json")],
}
EVENTS: Message = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}


def body_of(*parts: bytes) -> list[Message]:
    return [
        {"type": "http.response.body", "body": part, "more_body": index < len(parts) - 1}
        for index, part in enumerate(parts)
    ]


async def edited(*messages: Message) -> tuple[list[Message], AnswerEditor]:
    """What is sent of an answer whose chunks are numbered."""
    sent: list[Message] = []
    numbers = iter(range(99))

    async def send(message: Message) -> None:
        sent.append(message)

    editor = AnswerEditor(send, lambda answer: answer.update(number=next(numbers)))
    for message in messages:
        await editor(message)
    return sent, editor


async def test_a_whole_answer_is_edited_and_its_length_told() -> None:
    answer = json.dumps({"choices": [], "text": "é"}).encode()
    sent, editor = await edited(START, *body_of(answer[:7], answer[7:]))
    start, body = sent
    assert json.loads(body["body"]) == {"choices": [], "text": "é", "number": 0}
    assert dict(start["headers"])[b"content-length"] == str(len(body["body"])).encode()
    assert editor.succeeded


@pytest.mark.parametrize("cut", [1, 9, 20, 33, 47, 60])
async def test_chunks_are_edited_wherever_they_are_cut(cut: int) -> None:
    stream = (
        b': ping\n\ndata: {"choices": []}\n\ndata: {"choices": [1]}\n\ndata: {"error": {}}\n\ndata:'
        b" [DONE]\n\n"
    )
    sent, _ = await edited(EVENTS, *body_of(stream[:cut], stream[cut:], b""))
    told = b"".join(message["body"] for message in sent[1:])
    assert (
        told == b': ping\n\ndata: {"choices":[],"number":0}\n\ndata: {"choices":[1],"number":1}\n\n'
        b'data: {"error": {}}\n\ndata: [DONE]\n\n'
    )


async def test_errors_pass_as_they_are() -> None:
    messages = [{**START, "status": 400}, *body_of(b'{"choices": 1}')]
    sent, editor = await edited(*messages)
    assert sent == messages
    assert not editor.succeeded


async def test_a_body_is_read_and_given_again() -> None:
    given: list[Message] = [
        {"type": "http.request", "body": b"ab", "more_body": True},
        {"type": "http.request", "body": b"c", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return given.pop(0)

    body = await read_body(receive)
    again = replay_body(body, receive)
    assert await again() == {"type": "http.request", "body": b"abc", "more_body": False}
    assert (await again())["type"] == "http.disconnect"
    scope = with_length({"headers": [(b"content-length", b"9"), (b"host", b"h")]}, 3)
    assert scope["headers"] == [(b"host", b"h"), (b"content-length", b"3")]


PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "linked"),
    [
        (
            {"messages": [{"role": "user", "content": "about a \"link\" and a 'context_cache'"}]},
            False,
        ),
        ({"messages": [{"role": "user", "content": [PART]}], "link": None}, False),
        ({"messages": [{"role": "user", "content": [PART | {"cache_control": None}]}]}, False),
        (
            {
                "prompt": [1, 2],
                "tools": [{"function": {"parameters": {"properties": {"cache_control": {}}}}}],
            },
            False,
        ),
        ({"prompt": "x", "link": {}}, True),
        ({"prompt": [{"type": "context_cache", "id": "cc_1"}]}, True),
        (
            {
                "messages": [
                    {"role": "user", "content": [PART, {"type": "context_cache", "id": "cc_1"}]}
                ]
            },
            True,
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [PART | {"cache_control": {"type": "ephemeral"}}]}
                ]
            },
            True,
        ),
        (
            {
                "messages": [],
                "tools": [{"function": {"name": "f"}, "cache_control": {"type": "ephemeral"}}],
            },
            True,
        ),
        ({"system": [PART | {"cache_control": {"type": "ephemeral"}}], "messages": []}, True),
        (
            {
                "input": [
                    {
                        "role": "user",
                        "content": [PART | {"prompt_cache_breakpoint": {"mode": "explicit"}}],
                    }
                ]
            },
            True,
        ),
    ],
)
def test_what_asks_for_linking(fields: dict[str, Any], linked: bool) -> None:
    assert is_linked(json.dumps(fields).encode()) is linked


@pytest.mark.parametrize(
    "body",
    [b"", b'"link"', b'{"link": ', b'["link", 1]', b"[" * 100_000 + b'"link"'],
    ids=["nothing", "text", "half", "list", "deep"],
)
def test_what_is_no_object_is_left_to_vllm(body: bytes) -> None:
    assert not is_linked(body)
