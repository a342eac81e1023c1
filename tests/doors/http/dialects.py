"""Conversations with tools in the words of each API: answers and events are read by the SDKs' own
types, strictly, and a stream is held against the whole answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anthropic.types import Message, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from pydantic_core import from_json

from tests.doors.http.serving import Served
from tests.doors.http.test_tools import TIME, WEATHER
from tests.schemas import check

TOOLS: tuple[Any, ...] = (WEATHER, TIME)


@dataclass(frozen=True)
class Asked:
    """A question, and how it may be answered."""

    question: str = "What is the weather?"
    choice: str = "auto"
    """``auto``, ``required``, or the name of the tool that is to be called."""

    max_tokens: int = 300
    several: bool = True
    stop: Sequence[str] = ()
    temperature: float = 1
    tools: Sequence[Any] = TOOLS
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Other fields, which Anthropic's API has not."""

    @property
    def forced(self) -> bool:
        return self.choice != "auto"


@dataclass(frozen=True)
class Told:
    """What an answer says, alike in all dialects."""

    text: str
    calls: tuple[tuple[str, str], ...]
    """Names, and arguments as JSON."""

    end: str
    """``stop``, ``calls`` or ``length``."""

    tokens: int


def check_told(told: Told, asked: Asked) -> None:
    """Text has no marks, nor anything that ends it; arguments are valid, or, in the last call of an
    answer that was cut, the beginning of JSON."""
    assert "<tool_call" not in told.text
    assert not told.text.strip().startswith('{"name"')
    assert not any(stop in told.text for stop in asked.stop)
    assert told.end in (("calls", "length") if asked.forced else ("stop", "calls", "length"))
    assert told.calls or told.end != "calls"
    assert not (asked.forced and told.text)
    assert asked.several or len(told.calls) < 2
    parameters = {tool["function"]["name"]: tool["function"].get("parameters", {})
                  for tool in asked.tools}  # fmt: skip
    for index, (name, arguments) in enumerate(told.calls):
        assert name in parameters
        assert asked.choice in ("auto", "required", name)
        if told.end == "length" and index == len(told.calls) - 1:
            check_beginning(arguments)
        else:
            check(parameters[name], json.loads(arguments))


def check_beginning(arguments: str) -> None:
    """Check that this is JSON, or what may become JSON."""
    from_json(arguments or "{", allow_partial=True)  # which minds nothing behind an object
    with suppress(ValueError):
        _, end = json.JSONDecoder().raw_decode(arguments)
        assert end == len(arguments), arguments


class Dialect(ABC):
    """One of the APIs."""

    path: ClassVar[str]
    answer: ClassVar[TypeAdapter[Any]]
    event: ClassVar[TypeAdapter[Any]]

    def ask(self, served: Served, asked: Asked, **fields: Any) -> Told:
        """What the answer says, as a whole and in a stream; both are sent back to go on with."""
        body = self.body(asked) | fields
        answer = served.post(self.path, body)
        assert answer.status_code == 200, answer.text
        whole = self.read(self.answer.validate_json(answer.text, strict=True))
        self.go_on(served, body, answer.json())
        streamed = self.read_events(self.events(served, body))
        if asked.temperature == 0 or "seed" in body:
            assert streamed == whole
        if whole.end == "length":
            assert whole.tokens == asked.max_tokens
        return streamed

    def events(self, served: Served, body: dict[str, Any]) -> list[Any]:
        """The events of a stream."""
        answer = served.post(self.path, body | {"stream": True})
        assert answer.status_code == 200, answer.text
        data = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
        return [self.event.validate_json(each, strict=True) for each in data if each != "[DONE]"]

    def go_on(self, served: Served, body: dict[str, Any], answer: dict[str, Any]) -> None:
        """Send the answer back, whatever it is, with another question."""
        turns = {name: body[name] for name in ("model", "tools")} | self.history(body, answer)
        again = served.post(self.path, turns)
        assert again.status_code == 200, again.text

    @abstractmethod
    def body(self, asked: Asked) -> dict[str, Any]:
        """The request."""

    @abstractmethod
    def read(self, answer: Any) -> Told:
        """What a whole answer says."""

    @abstractmethod
    def read_events(self, events: list[Any]) -> Told:
        """What a stream says."""

    @abstractmethod
    def history(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        """The fields of the next request, for one token."""


class Chat(Dialect):
    path = "/v1/chat/completions"
    answer = TypeAdapter(ChatCompletion)
    event = TypeAdapter(ChatCompletionChunk)

    def body(self, asked: Asked) -> dict[str, Any]:
        named = {"type": "function", "function": {"name": asked.choice}}
        return {
            "model": "default",
            "messages": [{"role": "user", "content": asked.question}],
            "tools": list(asked.tools),
            "tool_choice": asked.choice if asked.choice in ("auto", "required") else named,
            "parallel_tool_calls": asked.several,
            "max_tokens": asked.max_tokens,
            "stop": list(asked.stop),
            "temperature": asked.temperature,
            **asked.sampling,
        }

    def events(self, served: Served, body: dict[str, Any]) -> list[Any]:
        return super().events(served, body | {"stream_options": {"include_usage": True}})

    def read(self, answer: ChatCompletion) -> Told:
        (choice,) = answer.choices
        calls = [call.model_dump()["function"] for call in choice.message.tool_calls or ()]
        assert (choice.message.content is None) == bool(calls) or choice.message.content
        assert answer.usage is not None
        return Told(
            choice.message.content or "",
            tuple((call["name"], call["arguments"]) for call in calls),
            choice.finish_reason.replace("tool_calls", "calls"),
            answer.usage.completion_tokens,
        )

    def read_events(self, events: list[ChatCompletionChunk]) -> Told:
        *chunks, last = events
        text, calls, ends = "", list[tuple[str, str]](), list[str]()
        for chunk in chunks:
            (choice,) = chunk.choices
            text += choice.delta.content or ""
            ends += [choice.finish_reason] if choice.finish_reason else []
            for delta in choice.delta.tool_calls or ():
                assert delta.function is not None
                if delta.function.name:
                    assert delta.id
                    calls.append((delta.function.name, ""))
                assert delta.index == len(calls) - 1, "calls come in order"
                name, arguments = calls[-1]
                calls[-1] = name, arguments + (delta.function.arguments or "")
        (end,) = ends
        assert last.usage is not None
        return Told(
            text, tuple(calls), end.replace("tool_calls", "calls"), last.usage.completion_tokens
        )

    def history(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        turn = answer["choices"][0]["message"]
        return {"messages": [*body["messages"], turn, *body["messages"]], "max_tokens": 1}


class Messages(Dialect):
    path = "/v1/messages"
    answer = TypeAdapter(Message)
    event = TypeAdapter(RawMessageStreamEvent)

    def body(self, asked: Asked) -> dict[str, Any]:
        word = {"auto": "auto", "required": "any"}.get(asked.choice)
        choice = {"type": word} if word else {"type": "tool", "name": asked.choice}
        return {
            "model": "default",
            "messages": [{"role": "user", "content": asked.question}],
            "tools": [self._tool(**tool["function"]) for tool in asked.tools],
            "tool_choice": choice | {"disable_parallel_tool_use": not asked.several},
            "max_tokens": asked.max_tokens,
            "stop_sequences": list(asked.stop),
            "temperature": asked.temperature,
        }

    def _tool(self, name: str, parameters: Any = None, **rest: Any) -> dict[str, Any]:
        return {"name": name, "input_schema": parameters or {"type": "object"}, **rest}

    def read(self, answer: Message) -> Told:
        calls = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason is not None
        return Told(
            "".join(block.text for block in answer.content if block.type == "text"),
            tuple((call.name, json.dumps(call.input)) for call in calls),
            self._end(answer.stop_reason),
            answer.usage.output_tokens,
        )

    def read_events(self, events: list[Any]) -> Told:
        kinds = [event.type for event in events]
        assert kinds[0] == "message_start"
        assert kinds[-2:] == ["message_delta", "message_stop"]
        blocks: list[Any] = []
        for event in events[1:-2]:
            if event.type == "content_block_start":
                blocks.append([event.content_block, ""])
                continue
            assert event.index == len(blocks) - 1, "blocks come in order"
            if event.type == "content_block_delta":
                kind = {"text": "text", "tool_use": "partial_json"}[blocks[-1][0].type]
                blocks[-1][1] += getattr(event.delta, kind)
        assert kinds.count("content_block_start") == kinds.count("content_block_stop")
        calls = [(block.name, text) for block, text in blocks if block.type == "tool_use"]
        for _, text in calls:
            check_beginning(text)
        return Told(
            "".join(text for block, text in blocks if block.type == "text"),
            tuple(
                (name, json.dumps(from_json(text or "{}", allow_partial=True)))
                for name, text in calls
            ),
            self._end(events[-2].delta.stop_reason),
            events[-2].usage.output_tokens,
        )

    def _end(self, reason: str) -> str:
        ends = {"max_tokens": "length", "tool_use": "calls"}
        return ends.get(reason, "stop")

    def history(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        turns = body["messages"]
        turn = {"role": "assistant", "content": answer["content"]}
        middle = [turn] if turn["content"] else []
        return {"messages": [*turns, *middle, *turns], "max_tokens": 1}


class Responses(Dialect):
    path = "/v1/responses"
    answer = TypeAdapter(Response)
    event = TypeAdapter(ResponseStreamEvent)

    def body(self, asked: Asked) -> dict[str, Any]:
        named = {"type": "function", "name": asked.choice}
        return {
            "model": "default",
            "input": [{"role": "user", "content": asked.question}],
            "tools": [{"type": "function", **tool["function"]} for tool in asked.tools],
            "tool_choice": asked.choice if asked.choice in ("auto", "required") else named,
            "parallel_tool_calls": asked.several,
            "max_output_tokens": asked.max_tokens,
            "stop": list(asked.stop),
            "temperature": asked.temperature,
            **asked.sampling,
        }

    def read(self, answer: Response) -> Told:
        calls = [item for item in answer.output if item.type == "function_call"]
        if answer.status == "completed":
            end = "calls" if calls else "stop"
        else:
            assert answer.incomplete_details is not None
            assert answer.incomplete_details.reason == "max_output_tokens"
            end = "length"
        whole = [item.status == "completed" for item in calls]
        assert all(whole[:-1])
        assert end == "length" or all(whole)
        assert answer.usage is not None
        texts = [part.text for item in answer.output if item.type == "message"
                 for part in item.content if part.type == "output_text"]  # fmt: skip
        return Told(
            "".join(texts),
            tuple((call.name, call.arguments) for call in calls),
            end,
            answer.usage.output_tokens,
        )

    def read_events(self, events: list[Any]) -> Told:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        created, _, *_, last = events
        assert created.type == "response.created"
        assert last.type == f"response.{last.response.status}"
        pieces: dict[int, str] = {}
        for event in events:
            if event.type in (
                "response.output_text.delta",
                "response.function_call_arguments.delta",
            ):
                pieces[event.output_index] = pieces.get(event.output_index, "") + event.delta
        for index, item in enumerate(last.response.output):
            said = item.arguments if item.type == "function_call" else item.content[0].text
            assert pieces.get(index, "") == said
        added = [e.item.type for e in events if e.type == "response.output_item.added"]
        assert added == [item.type for item in last.response.output]
        return self.read(last.response)

    def history(self, body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
        turns = body["input"]
        return {"input": [*turns, *answer["output"], *turns], "max_output_tokens": 1}


CHAT, MESSAGES, RESPONSES = Chat(), Messages(), Responses()
DIALECTS: Mapping[str, Dialect] = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
