"""Errors as OpenAI shapes them: every exception that can reach the edge of the server becomes one here."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvlinker.errors import AuthenticationError, KVLinkerError, OverloadedError
from kvlinker.server.request_ids import RequestIds, request_id_of

logger = logging.getLogger(__name__)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}


def error_body(message: str, *, kind: str, param: str | None, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def body_of(error: KVLinkerError, scope: Scope) -> dict[str, Any]:
    """The body of an error answer, which is also the last event of a stream that fails.

    What is not the caller's fault is logged, and its body says no more than where to find that.
    """
    if error.status == KVLinkerError.status:
        logger.error("Request %s failed: %s", request_id_of(scope), error.message)
        return _inner_body(error, scope)
    return error_body(error.message, kind=error.type, param=error.param, code=error.code)


def error_response(error: KVLinkerError, scope: Scope) -> JSONResponse:
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(body_of(error, scope), status_code=error.status, headers=headers)


def install_error_handling(app: FastAPI) -> None:
    app.add_exception_handler(KVLinkerError, _on_kvlinker_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(RequestIds)


async def _on_kvlinker_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, KVLinkerError)
    return error_response(error, request.scope)


async def _on_validation_error(_: Request, error: Exception) -> JSONResponse:
    """The first complaint, with the path of the parameter, such as ``messages.0.content.1.id``."""
    assert isinstance(error, RequestValidationError)
    message, param, code = _describe(error.errors()[0])
    return _invalid_request(400, message, param=param, code=code)


async def _on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Unknown routes, wrong methods, and bodies that are too large or not text."""
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "invalid_json")
    messages = {
        "not_found": f"No such route: {request.method} {request.url.path}.",
        "method_not_allowed": f"{request.url.path} does not take {request.method}.",
        "body_too_large": f"The body is too large: {error.detail}.",
        "invalid_json": "The body is not JSON in UTF-8.",
    }
    return _invalid_request(error.status_code, messages[code], param=None, code=code, headers=error.headers)


class UnexpectedErrors:
    """ASGI middleware: bugs become a 500 that says nothing of the inside, with the traceback in the log.

    The framework's own handler raises the error again, whereupon the connection is closed under the client.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if scope["type"] != "http" or started:
                raise
            logger.exception("Request %s (%s %s) failed", request_id_of(scope), scope["method"], scope["path"])
            body = _inner_body(KVLinkerError(""), scope)
            await JSONResponse(body, status_code=KVLinkerError.status)(scope, receive, send)


def _inner_body(error: KVLinkerError, scope: Scope) -> dict[str, Any]:
    """Of a failure that is none of the caller's business."""
    message = f"{error.summary} Its log says why, under {request_id_of(scope)}."
    return error_body(message, kind=error.type, param=error.param, code=error.code)


def _invalid_request(
    status: int, message: str, *, param: str | None, code: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    body = error_body(message, kind="invalid_request_error", param=param, code=code)
    return JSONResponse(body, status_code=status, headers=headers)


def _describe(complaint: Mapping[str, Any]) -> tuple[str, str | None, str]:
    """Message, param and code of one of pydantic's complaints."""
    param = _path(complaint["loc"])
    match complaint["type"]:
        case "json_invalid":
            position = complaint["loc"][-1]
            return f"The body is not valid JSON: {complaint['ctx']['error']} at {position}.", None, "invalid_json"
        case "missing" if param is None:
            return "The request needs a JSON body.", None, "missing_required_parameter"
        case "missing":
            return f"Missing required parameter: {param!r}.", param, "missing_required_parameter"
        case "extra_forbidden":
            return f"Unknown parameter: {param!r}.", param, "unknown_parameter"
        case "model_attributes_type" if param is None:
            return "The body must be a JSON object, sent as application/json.", None, "invalid_type"
        case kind:
            subject = "Invalid body" if param is None else f"Invalid {param!r}"
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return f"{subject}: {complaint['msg']}.", param, code


def _path(location: Sequence[str | int]) -> str | None:
    """The parameter's path, without the source in front and without the tags of unions and keys."""
    return ".".join(str(part) for part in location[1:] if not str(part).startswith(("<", "["))) or None
