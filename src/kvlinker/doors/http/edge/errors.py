"""Errors as OpenAI shapes them, or Anthropic on its routes: every exception that can reach the edge
of the server becomes one here."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Scope

from kvlinker.base.errors import (
    AuthenticationError,
    CatalogUnavailableError,
    ContextLengthError,
    EngineClosedError,
    InvalidRequestError,
    KVLinkerError,
    ModelLoadingError,
    OverloadedError,
    shortened,
)
from kvlinker.base.types.limits import MAX_MESSAGE_CHARACTERS
from kvlinker.doors.http.fields.bodies import ResponseBody

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"

ANTHROPIC_HEADER, ANTHROPIC_ID_HEADER = "anthropic-version", "request-id"
"""The header by which Anthropic's clients are known, and the one in which they look for the id."""

IGNORED_HEADER = "X-Ignored-Fields"
"""Names the fields and entries of a request that had no effect."""

_HTTP_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "body_too_large",
}

_METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")

_JSON_KINDS = frozenset({"list", "dict", "str", "bool", "int", "float", "NoneType"})
"""The names by which pydantic tells kinds of values apart in JSON of any kind."""

_RETRY_AFTER = {
    "description": "Seconds to wait before trying again.",
    "schema": {"type": "integer"},
}

_MEANINGS = {
    400: "The request is wrong: `param` names the field, `code` the mistake.",
    401: "The API key is missing or unknown (`invalid_api_key`).",
    403: "Not permitted: `quota_exceeded`, `pin_limit_exceeded` or `permission_denied`.",
    404: "Not found: `context_cache_not_found`, `response_not_found` or `model_not_found`.",
    408: "The body did not come in time (`request_timeout`).",
    413: "The body is too large (`body_too_large`).",
    415: "The body's encoding is not known (`unsupported_encoding`).",
    421: "The host name is not the server's (`unknown_host`).",
    429: "Too many requests wait already (`overloaded`): try again later.",
    500: "The server failed; its log says why under the request's id.",
    503: "The server is shutting down or its engine has failed (`engine_closed`), or the catalog's"
    " database does not answer (`catalog_unavailable`).",
}


_MESSAGES_PATH = "/v1/messages"

_MESSAGES_TYPES = {
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


class UnknownHostError(KVLinkerError):
    """Raised for a request to a host name that is not the server's."""

    status = 421
    type = "invalid_request_error"
    code = "unknown_host"


class UnknownEncodingError(KVLinkerError):
    """Raised for a body in an encoding that the server cannot read."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_encoding"

    def __init__(self, encoding: str, *, known: str) -> None:
        super().__init__(
            f"The body's 'Content-Encoding' is {encoding[:100]!r}, but can be one of {known}. Leave"
            " the header out, and send the body as it is."
        )
        self.known = known


class ErrorDetails(ResponseBody):
    """Describes an error. ``param`` is the path of the field at fault, such as
    ``messages.0.content.1.id``."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(ResponseBody):
    """Every error is answered by this body, and a stream that fails has it as its last event."""

    error: ErrorDetails


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
    return path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")


def messages_error(message: str, status: int, request_id: str | None) -> MessagesError:
    """Return the body of an error with this HTTP status."""
    kind = _MESSAGES_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = MessagesErrorDetails(type=kind, message=message)
    return MessagesError(type="error", error=details, request_id=request_id)


def error_responses(
    *statuses: int, model: type[ResponseBody] = ErrorBody
) -> dict[int | str, dict[str, Any]]:
    """Describe the error answers that a route can give, for its ``responses``; the app adds those
    that all share."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"model": model, "description": _MEANINGS[status]}
        if status in (OverloadedError.status, EngineClosedError.status):
            described[status]["headers"] = {"Retry-After": _RETRY_AFTER}
    return described


def error_body(error: KVLinkerError, scope: Scope) -> ErrorBody:
    """Make the body for an error. Errors that are not the caller's fault are logged, and their
    bodies only refer to the log. A prompt that is too long begins as in Anthropic's API where that
    is spoken: agents go by these words when they compact a conversation."""
    if error.status == KVLinkerError.status:
        logger.error("Request %s failed: %s", request_id_of(scope), error.message)
        return _inner_body(error, scope)
    message = error.message
    if isinstance(error, ContextLengthError) and error.excess and speaks_messages(scope["path"]):
        tokens, most = error.excess
        message = f"prompt is too long: {tokens} tokens > {most} maximum. {message}"
    return _body(message, error.type, error.param, error.code)


def failure_of(error: Exception, scope: Scope) -> KVLinkerError:
    """Return the error that a stream which failed half way ends with: a bug is logged with its
    trace, and its details are not for the caller."""
    if isinstance(error, KVLinkerError):
        return error
    logger.error("The stream of request %s failed", request_id_of(scope), exc_info=error)
    return KVLinkerError(f"{type(error).__name__} in a stream")


def as_messages_error(body: ErrorBody, status: int, scope: Scope) -> MessagesError:
    """Return the body of an error with this HTTP status in the words of Anthropic's API."""
    return messages_error(body.error.message, status, request_id_of(scope))


def error_model(path: str) -> type[ResponseBody]:
    """Return the body of the errors of a route."""
    return MessagesError if speaks_messages(path) else ErrorBody


def as_invalid_request(
    error: ValidationError, rename: Callable[[str | None], str | None]
) -> InvalidRequestError:
    """Return the error of a value that is wrong, with the path of its field renamed."""
    complaint = error.errors(include_url=False)[0]
    path = rename(_path(("body", *complaint["loc"])))
    message, param, code = _describe({**complaint, "loc": ("body", *(path or "").split("."))})
    return InvalidRequestError(message, param=param, code=code)


def error_response(error: KVLinkerError, scope: Scope) -> JSONResponse:
    """Make the answer for an error, with the headers that go with it."""
    headers = {}
    if isinstance(
        error, OverloadedError | EngineClosedError | ModelLoadingError | CatalogUnavailableError
    ):
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnknownEncodingError):
        headers |= {"Accept-Encoding": error.known, "Connection": "close"}
    return _response(error_body(error, scope), error.status, scope, headers)


def blame(error: BaseException, field: str, *, length: str = "max_tokens") -> None:
    """Name the request's ``field`` in an error about a whole prompt, and the field ``length`` in an
    error about the answer's length."""
    if isinstance(error, InvalidRequestError):
        if error.param in ("messages", "prompt"):
            error.param = field
        elif error.param == "max_tokens":
            error.param = length


@contextmanager
def blaming(field: str) -> Iterator[None]:
    """``blame`` the field in the errors of the block."""
    try:
        yield
    except InvalidRequestError as error:
        blame(error, field)
        raise


def add_error_handlers(app: FastAPI) -> None:
    """Answer exceptions of the app by the error body."""
    app.add_exception_handler(KVLinkerError, _on_kvlinker_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)


def request_id_of(scope: Scope) -> str:
    """Return the id that ``name_request`` gave the request."""
    request_id: str = scope["state"]["request_id"]
    return request_id


def note_ignored(scope: Scope, paths: Iterable[str]) -> None:
    """Name the request's fields and entries without effect in a header of the answer. Names are the
    caller's text: a header holds printable ASCII, and no space at its ends."""
    escaped = (path.encode("ascii", "backslashreplace").decode() for path in paths)
    shown = (re.sub(r"[^!-~]", "?", path) or "?" for path in escaped)
    scope["state"].setdefault("ignored", []).extend(shown)


def unexpected_error_response(scope: Scope) -> JSONResponse:
    """Make the answer for a bug, whose exception is being handled: it is logged with its trace, and
    the answer says nothing of the inside."""
    logger.exception(
        "Request %s (%s %s) failed", request_id_of(scope), scope["method"], scope["path"]
    )
    return _response(_inner_body(KVLinkerError(""), scope), KVLinkerError.status, scope)


async def _on_kvlinker_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KVLinkerError)
    return error_response(error, request.scope)


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Answer with the first complaint, and the path of its field, such as
    ``messages.0.content.1.id``."""
    assert isinstance(error, RequestValidationError)
    complaint = error.errors()[0]
    place = _within(error.body, complaint)
    message, param, code = _describe({**complaint, "loc": place})
    return _response(_body(message, InvalidRequestError.type, param, code), 400, request.scope)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Answer unknown routes, wrong methods, and bodies that are too large, too slow or not text."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "invalid_json")
    path = request.url.path
    headers = error.headers
    if code == "method_not_allowed":
        headers = {"Allow": ", ".join(_allowed_methods(request.app, request.scope["path"]))}
    slash = " Leave the slash at its end out." if path.endswith("/") else ""
    messages = {
        "not_found": f"No such route: {request.method} {path}.{slash}",
        "method_not_allowed": f"{path} does not take {request.method}.",
        "request_timeout": f"The body did not come in time: {error.detail}. Send it again, faster.",
        "body_too_large": f"The body is too large: {error.detail}. Send less at once.",
        "invalid_json": "The body is not JSON in UTF-8, or is nested too deeply, or has a number of"
        " thousands of digits.",
    }
    body = _body(messages[code], InvalidRequestError.type, None, code)
    return _response(body, error.status_code, request.scope, headers)


def _allowed_methods(app: FastAPI, path: str) -> tuple[str, ...]:
    """Return the methods that the routes of ``path`` take together, sorted."""
    asked: Scope = {"type": "http", "path": path, "root_path": "", "headers": []}
    found = {
        method
        for method in _METHODS
        if any(
            route.matches({**asked, "method": method})[0] is Match.FULL
            for route in app.router.routes
        )
    }
    return tuple(sorted(found | {"HEAD"} if "GET" in found else found))


def _response(
    body: ErrorBody, status: int, scope: Scope, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Return the answer for an error, in the words of the route's API."""
    content = as_messages_error(body, status, scope) if speaks_messages(scope["path"]) else body
    return JSONResponse(content.model_dump(), status_code=status, headers=headers)


def _inner_body(error: KVLinkerError, scope: Scope) -> ErrorBody:
    """Make the body for a failure of the server's own, which is none of the caller's business."""
    message = f"{error.summary} Its log says why, under {request_id_of(scope)}."
    return _body(message, error.type, error.param, error.code)


def _body(message: str, kind: str, param: str | None, code: str) -> ErrorBody:
    text = shortened(message, MAX_MESSAGE_CHARACTERS)
    return ErrorBody(error=ErrorDetails(message=text, type=kind, param=param, code=code))


def _describe(complaint: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Return message, param and code for one of pydantic's complaints."""
    param = _path(complaint["loc"])
    match complaint["type"]:
        case "json_invalid":
            position = complaint["loc"][-1]
            return (
                f"The body is not valid JSON: {complaint['ctx']['error']} at {position}.",
                None,
                "invalid_json",
            )
        case "missing" if param is None:
            return "The request needs a JSON body.", None, "missing_required_parameter"
        case "missing":
            return f"Missing required parameter: {param!r}.", param, "missing_required_parameter"
        case "extra_forbidden":
            meant = complaint.get("ctx", {}).get("meant", "")
            return f"Unknown parameter: {param!r}.{meant}", param, "unknown_parameter"
        case "unsupported_parameter":
            why = complaint.get("ctx", {}).get("why", "")
            unsupported = f"{param!r} is not supported{why and f': {why}'}. Leave it out."
            return unsupported, param, "unsupported_parameter"
        case "model_attributes_type" if param is None:
            return "The body must be a JSON object, sent as application/json.", None, "invalid_type"
        case kind:
            subject = "Invalid body" if param is None else f"Invalid {param!r}"
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return f"{subject}: {complaint['msg']}.", param, code


def _within(body: Any, complaint: Mapping[str, Any]) -> Sequence[str | int]:
    """Return the location of a complaint as it is in the body, without the kinds of values that
    pydantic names in JSON of any kind, as in ``minimum.float``."""
    source, *parts = complaint["loc"]
    if source != "body" or not isinstance(body, Mapping):
        return (source, *parts)
    found: list[str | int] = [source]
    value = body
    for part in parts:
        is_field = isinstance(value, Mapping) and part in value
        if is_field or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
        elif part in _JSON_KINDS:
            continue
        found.append(part)
    return found


def _path(location: Sequence[str | int]) -> str | None:
    """Return the field's path, without the source in front and without the tags of unions and
    keys."""
    return (
        ".".join(str(part) for part in location[1:] if not str(part).startswith(("<", "["))) or None
    )
