"""Forwards requests within one server: reads bodies before vLLM does, and adds to the answers on
their way."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Receive, Scope, Send

Answer = dict[str, Any]
"""An answer, or one chunk of a streamed one, as JSON."""


async def read_body(receive: Receive) -> bytes:
    """Return the whole body of a request, or the part that came before its client disconnected."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives ``body`` first, and then the remaining messages."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def with_length(scope: Scope, length: int) -> Scope:
    """Return the scope of the same request with a body of ``length`` bytes."""
    headers = [
        (name, value)
        for name, value in scope["headers"]
        if name not in (b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", str(length).encode())]}


def json_bytes(value: Mapping[str, Any]) -> bytes:
    """Return a value as JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class AnswerEditor:
    """A ``send`` that has ``edit`` change an answer, or each chunk of a streamed one. Errors pass
    as they are."""

    def __init__(self, send: Send, edit: Callable[[Answer], None]) -> None:
        self.succeeded = False
        """True once the answer's status is known to be 200."""

        self._send = send
        self._edit = edit
        self._start: Message | None = None
        self._streams = False
        self._rest = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            await self._begin(message)
        elif message["type"] == "http.response.body" and self._streams:
            await self._send({**message, "body": self._events(message)})
        elif message["type"] == "http.response.body" and self._start is not None:
            await self._collect_body(message)
        else:
            await self._send(message)

    async def _begin(self, message: Message) -> None:
        self.succeeded = message["status"] == 200
        kind = MutableHeaders(scope=message).get("content-type", "")
        self._streams = self.succeeded and kind.startswith("text/event-stream")
        if self.succeeded and not self._streams:
            self._start = message  # its length is known when the body is
        else:
            await self._send(message)

    async def _collect_body(self, message: Message) -> None:
        """Keep a part of a JSON body, and send the whole with its last one."""
        self._rest += message.get("body", b"")
        if message.get("more_body", False):
            return
        assert self._start is not None
        body = self._edit_body(self._rest)
        MutableHeaders(scope=self._start)["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _events(self, message: Message) -> bytes:
        """Return the server-sent events that are whole by now."""
        *events, rest = (self._rest + message.get("body", b"")).split(b"\n\n")
        self._rest = rest if message.get("more_body", False) else b""
        sent = b"".join(self._event(event) + b"\n\n" for event in events)
        return sent if message.get("more_body", False) else sent + rest

    def _event(self, event: bytes) -> bytes:
        head, mark, data = event.partition(b"data: ")
        return head + mark + self._edit_body(data) if data.startswith(b"{") else event

    def _edit_body(self, body: bytes) -> bytes:
        answer = json.loads(body)
        if not isinstance(answer, dict) or "choices" not in answer:
            return body
        self._edit(answer)
        return json_bytes(answer)
