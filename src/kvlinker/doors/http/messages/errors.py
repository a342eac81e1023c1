"""Errors as Anthropic's API has them, for its routes."""

from __future__ import annotations

from typing import Literal

from kvlinker.doors.http.fields.bodies import ResponseBody

_PATH = "/v1/messages"

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The types of errors by HTTP status."""


class MessagesErrorDetails(ResponseBody):
    """Describes an error."""

    type: str
    message: str


class MessagesError(ResponseBody):
    """Every error of these routes is answered by this body, and a stream that fails has it as its
    last event."""

    type: Literal["error"]
    error: MessagesErrorDetails
    request_id: str | None


def speaks_messages(path: str) -> bool:
    """Return whether the errors of a path are Anthropic's."""
    return path == _PATH or path.startswith(f"{_PATH}/")


def messages_error(message: str, status: int, request_id: str | None) -> MessagesError:
    """Return the body of an error with this HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = MessagesErrorDetails(type=kind, message=message)
    return MessagesError(type="error", error=details, request_id=request_id)
