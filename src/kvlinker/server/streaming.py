"""Answers as server-sent events, in the chunks that OpenAI's clients read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvlinker.errors import KVLinkerError
from kvlinker.server.errors import body_of
from kvlinker.server.formats.base import AnswerFormat
from kvlinker.server.formats.usage import usage_body
from kvlinker.server.generation import Generation
from kvlinker.types.answers import Finished, Usage

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Sends a generation as it goes, and cancels it as soon as the client is gone."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, answer: AnswerFormat, *, include_usage: bool) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._generation = generation
        self._answer = answer
        self._include_usage = include_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation = self._generation
        with generation.cancelled_on_error():
            await send({"type": "http.response.start", "status": HTTPStatus.OK, "headers": self.raw_headers})
            async with generation.cancelled_on_disconnect(receive):
                async for chunk in self._chunks(scope):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def _chunks(self, scope: Scope) -> AsyncIterator[bytes]:
        finished: dict[int, Usage] = {}
        try:
            for index in range(self._generation.choices):
                for chunk in self._answer.opening(index):
                    yield self._event(chunk)
            async for index, event in self._generation.events():
                if isinstance(event, Finished):
                    finished[index] = event.usage
                    yield self._event(self._answer.closing(index, event))
                elif event.text or event.logprobs:
                    yield self._event(self._answer.delta(index, event))
            if self._include_usage:
                usages = [finished[index] for index in sorted(finished)]
                yield _encode(self._answer.envelope([]) | {"usage": usage_body(usages, self._generation.n)})
        except KVLinkerError as error:
            yield _encode(body_of(error, scope))
        yield _DONE

    def _event(self, choice: Mapping[str, Any]) -> bytes:
        chunk = self._answer.envelope([choice])
        return _encode(chunk | {"usage": None} if self._include_usage else chunk)


def _encode(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
