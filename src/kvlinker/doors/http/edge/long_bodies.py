"""Long bodies, which are parsed outside the event loop, so that no other request waits for them.

Python's JSON parser holds the interpreter's lock until it is done, in any thread: so the values in
a body are counted first, piece by piece, and a body with far too many is refused without being
parsed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.limits import MOST_JSON_NODES, MOST_JSON_VALUES

LONG_BODY_BYTES = 16 * 2**10
"""The length of a body from which on it is read in a thread."""

_PIECE_BYTES = 2**16

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Validate = Callable[[Any], tuple[Any, Any]]


class BodyRoute(APIRoute):
    """A route that parses and validates long bodies in a thread. All routes with a body are
    such."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()
        field = self.body_field
        if field is None:
            return handle

        def validate(value: Any) -> tuple[Any, Any]:
            return field.validate(value, {}, loc=("body",))

        async def read(request: Request) -> Response:
            if len(await request.body()) < LONG_BODY_BYTES:
                return await handle(request)
            long = _LongRequest(request.scope, request.receive, await request.body(), validate)
            try:
                return await handle(long)
            except HTTPException as error:
                raise long.failure or error from None

        return read


class _LongRequest(Request):
    """A request whose body is there. Its ``json`` returns the validated body, which validates to
    itself at once.

    The framework takes any error of ``json`` for one of syntax: ``failure`` is the one that it was.
    """

    def __init__(self, scope: Scope, receive: Receive, body: bytes, validate: Validate) -> None:
        super().__init__(scope, receive)
        self.failure: Exception | None = None
        self._body = body
        self._validate = validate

    async def json(self) -> Any:
        try:
            return await self.app.state.served.encoding.run(self, self._read)
        except (KVLinkerError, RequestValidationError) as error:
            self.failure = error
            raise

    def _read(self) -> Any:
        check_json(self._body)
        body = json.loads(self._body.decode("utf-8-sig"))
        value, errors = self._validate(body)
        if errors:
            raise RequestValidationError(errors, body=body)
        return value


def check_json(body: bytes) -> None:
    """Count the values in a JSON text, without parsing it. Raises InvalidRequestError for too
    much."""
    values = nodes = 0
    within = False  # a string
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and start + len(piece) < len(body):
            piece = piece[:-1]  # what is escaped is in the next piece
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[within::2])
        within ^= len(parts) % 2 == 0
        values += outside.count(b",")
        nodes += outside.count(b"{") + outside.count(b"[") + outside.count(b":")
    for count, most, what in (
        (values, MOST_JSON_VALUES, "values"),
        (nodes, MOST_JSON_NODES, "objects, lists and fields"),
    ):
        if count > most:
            raise InvalidRequestError(
                f"The body has {count:,} {what}; at most {most:,} are taken. Send less at once.",
                code="body_too_complex",
            )
