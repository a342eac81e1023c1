"""Answers conversations in the format of APIs other than chat completions: each is a translator
from its bodies to a ``ChatCompletionRequest``, and from the one answer to its own bodies and
events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ValidationError
from starlette.types import Scope

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import Delta
from kvlinker.doors.http.answers.answer_blocks import AnswerBlock, BlockReader, BlockStep
from kvlinker.doors.http.answers.answering import ChoiceOutput, Choices, note_answer, respond
from kvlinker.doors.http.answers.chat import ChatCompletionRequest, Part, TextPart, show_part
from kvlinker.doors.http.answers.logprobs import entry_bytes
from kvlinker.doors.http.edge.errors import as_invalid_request, failure_of, note_ignored
from kvlinker.doors.http.models import ServedModel
from kvlinker.engines.contract.contract import Finished
from kvlinker.llm import LLM, ReadPrompt
from kvlinker.service.reading.reader import PreparedRequest


@dataclass
class Translation:
    """A request of another API as a chat request."""

    values: dict[str, Any] = field(default_factory=lambda: {"messages": []})
    """The chat request's fields."""

    fields: dict[str, str] = field(default_factory=dict)
    """Paths of fields of the chat request, with those of the caller's fields that they come from,
    where those have other names; the longest beginning of a path counts."""

    def request(self) -> ChatCompletionRequest:
        """Return the chat request. Raises InvalidRequestError, which names the caller's field."""
        given = {name: value for name, value in self.values.items() if value is not None}
        given["messages"] = [
            {**message, "content": message["content"] or _no_content(message["role"])}
            for message in given["messages"]
        ]
        try:
            with self.renaming():
                return ChatCompletionRequest.model_validate(given)
        except ValidationError as error:
            raise as_invalid_request(error, self._renamed) from error

    def add_message(self, role: str, **fields: Any) -> dict[str, Any]:
        """Add a message with an empty content, and return it."""
        message = {"role": role, "content": [], **fields}
        self.values["messages"].append(message)
        return message

    def add_result(self, call_id: str, *, origin: str) -> None:
        """Add a message for the result of a call, with an empty content; ``origin`` is the path of
        the call's id."""
        self.add_message("tool", tool_call_id=call_id)
        self.fields[f"{self._last_path}.tool_call_id"] = origin

    def add_content(self, content: str | Sequence[Part], *, origin: str) -> None:
        """Add a text, or parts, to the content of the last message; ``origin`` is the path that
        they come from."""
        if isinstance(content, str):
            self.add_part(TextPart(type="text", text=content), origin=origin)
            return
        for index, part in enumerate(content):
            self.add_part(part, origin=f"{origin}.{index}")

    def add_part(self, part: Part, *, origin: str) -> None:
        """Add a part to the content of the last message; ``origin`` is the path that it comes
        from."""
        seen = show_part(part)
        if seen is None:
            return
        content = self.last["content"]
        self.fields[f"{self._last_path}.content.{len(content)}"] = origin
        content.append(seen)

    def add_call(self, call_id: str, name: str, arguments: str, *, origin: str) -> None:
        """Add a call to the last message, with its arguments as JSON; ``origin`` is the path that
        it comes from."""
        calls = self.last.setdefault("tool_calls", [])
        self.fields[f"{self._last_path}.tool_calls.{len(calls)}.function"] = origin
        calls.append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )

    def add_reasoning(self, text: str) -> None:
        """Add to the reasoning of the last message."""
        if text:
            self.last["reasoning_content"] = self.last.get("reasoning_content", "") + text

    @property
    def last(self) -> dict[str, Any]:
        """The last message."""
        message: dict[str, Any] = self.values["messages"][-1]
        return message

    @property
    def _last_path(self) -> str:
        return f"messages.{len(self.values['messages']) - 1}"

    def own_path(self, path: str) -> str:
        """Return the path of the caller's field that a field of the chat request comes from."""
        names = path.split(".")
        for length in range(len(names), 0, -1):
            if own := self.fields.get(".".join(names[:length])):
                return ".".join((own, *names[length:]))
        return path

    @contextmanager
    def renaming(self) -> Iterator[None]:
        """Replace field names in errors of the block by the caller's."""
        try:
            yield
        except KVLinkerError as error:
            error.param = self._renamed(error.param)
            raise

    def _renamed(self, path: str | None) -> str | None:
        return None if path is None else self.own_path(path)


class EventBody(Protocol):
    """An event of a stream, which is sent under its ``type``."""

    @property
    def type(self) -> str: ...

    def model_dump_json(self, *, exclude_unset: bool) -> str: ...


class DialectAnswer(ABC):
    """The one answer to a conversation in the words of an API; fields that are not set in its
    bodies are not sent."""

    _read: ReadPrompt
    _reader: BlockReader

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._blocks: Sequence[AnswerBlock] = ()
        """All blocks, once the answer has ended."""

        self._finished: Finished | None = None

    def begin(self, read: ReadPrompt, reader: BlockReader) -> None:
        """Take note of the prompt, and of what reads the answer, before any other call."""
        self._read, self._reader = read, reader

    @abstractmethod
    def opening(self) -> Iterable[EventBody]:
        """Return the events with which a stream begins."""

    @abstractmethod
    def events_of(self, step: BlockStep) -> Iterable[EventBody]:
        """Return the events of a step."""

    @abstractmethod
    def closing(self) -> Iterable[EventBody]:
        """Return the events with which a stream ends. It takes long for long answers: call it in a
        thread."""

    @abstractmethod
    def failure(self, error: KVLinkerError, scope: Scope) -> Iterable[EventBody]:
        """Return the events of a stream that fails half way; ``scope`` is its request's."""

    @abstractmethod
    def body(self) -> BaseModel:
        """Return the whole answer, which has ended. It takes long for long answers: call it in a
        thread."""

    def whole(self, choices: Choices, outputs: Sequence[ChoiceOutput]) -> dict[str, Any]:
        ((deltas, finished),) = outputs
        for delta in deltas:
            self._steps(delta)
        self._steps(finished)
        return self.body().model_dump(mode="json", exclude_unset=True, by_alias=True)

    async def events(self, choices: Choices, scope: Scope) -> AsyncIterator[dict[str, str]]:
        try:
            for event in self.opening():
                yield _named(event)
            async for _, output in choices.events():
                if isinstance(output, Finished):
                    note_answer(scope, choices, [output])
                for step in self._steps(output):
                    for event in self.events_of(step):
                        yield _named(event)
            for event in await run_in_threadpool(lambda: list(self.closing())):
                yield _named(event)
        except Exception as error:
            for event in self.failure(failure_of(error, scope), scope):
                yield _named(event)

    def _steps(self, output: Delta | Finished) -> list[BlockStep]:
        """Read new output, or the end, and return the changes to the blocks."""
        if isinstance(output, Delta):
            return list(self._reader.feed(output.text, output.logprobs))
        steps = list(self._reader.finish(cut=output.reason != "stop"))
        self._blocks, self._finished = self._reader.blocks, output
        return steps


async def respond_in_dialect(
    served: ServedModel,
    request: Request,
    translation: Translation,
    answer: DialectAnswer,
    *,
    tenant: str,
) -> Response:
    """Answer a conversation, whole or as a stream."""
    chat = await served.encoding.run(request, translation.request)
    with translation.renaming():
        if chat.linking.explain:
            raise InvalidRequestError(
                "'link.explain' is for /v1/chat/completions and /v1/completions; /v1/link/explain"
                " explains a prompt without answering it.",
                param="link.explain",
            )
        served.check_model(chat.model)
        request_tools = chat.request_tools(served.llm)

        def build() -> PreparedRequest:
            asked = chat.prepare(served.llm, request_tools, tenant=tenant)
            (read,) = asked.prompts.values()
            reader = request_tools.reader(read.prompt)
            blocks = BlockReader(
                reader,
                lambda entry: entry_bytes(entry, served.llm.token_bytes),
                tells_reasoning=chat.tells_reasoning,
            )
            answer.begin(read, blocks)
            return asked

        ignored = chat.reasoning_effect(served.llm).ignored
        note_ignored(request.scope, map(translation.own_path, ignored))
        return await respond(
            served,
            request,
            build,
            answer,
            n=1,
            stream=bool(chat.stream),
        )


def _no_content(role: str) -> str | None:
    """Return the content of a message whose parts were all left out; an assistant's may have calls
    alone."""
    return None if role == "assistant" else ""


def _named(event: EventBody) -> dict[str, str]:
    return {"event": event.type, "data": event.model_dump_json(exclude_unset=True)}
