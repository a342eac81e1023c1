"""Checks that a server keeps to its own OpenAPI document; clients of tests check every answer that
they get."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from kvlinker.doors.http.edge.guards import with_version
from kvlinker.doors.http.pages import PAGE_PATHS

DOCUMENT = "/openapi.json"
EVENTS = "text/event-stream"
JSON = "application/json"


class Contract:
    """What an OpenAPI document says of requests and answers."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.document = document

    def check(self, response: httpx.Response) -> None:
        """Fail unless the answer's status, kind and body are documented, and the body sent, if that
        was accepted.

        Of streams, only the kind is checked. Routes and methods that do not exist are answered by
        the error body.
        """
        path = response.request.url.path
        if path == DOCUMENT or (path in PAGE_PATHS and path not in self.document["paths"]):
            return  # a page's files are no part of the API
        operation = self._operation(response.request)
        kind = response.headers["content-type"].partition(";")[0]
        if operation is None:
            assert response.status_code in (401, 404, 405), response.status_code
            content: Mapping[str, Any] = {
                JSON: {"schema": {"$ref": "#/components/schemas/ErrorBody"}}
            }
        else:
            described = operation["responses"].get(str(response.status_code))
            assert described, (
                f"{response.request.method} {response.url} has no answer {response.status_code}"
            )
            content = described["content"]
            always = [
                name
                for name, header in described.get("headers", {}).items()
                if header.get("required", True)
            ]
            missing = [name for name in always if name not in response.headers]
            assert not missing or kind == EVENTS, f"{response.url} is answered without {missing}"
        assert kind in content, (
            f"{response.url} is answered with {kind}, but should be with {list(content)}"
        )
        if kind == JSON and response.request.method != "HEAD":
            response.read()
            self.validate(response.json(), content[kind]["schema"])
        sent = response.request.headers
        sends_json = sent.get("content-type", JSON) == JSON and "content-encoding" not in sent
        if (
            operation is not None
            and response.is_success
            and response.request.content
            and sends_json
        ):
            self.validate(
                httpx.Response(200, content=response.request.content).json(),
                self.body_schema(operation),
            )

    def body_schema(self, operation: Mapping[str, Any]) -> Any:
        """The schema of the bodies that an operation takes."""
        return operation["requestBody"]["content"][JSON]["schema"]

    def validate(self, instance: Any, schema: Mapping[str, Any]) -> None:
        """Raises jsonschema's ValidationError."""
        Draft202012Validator({**schema, "components": self.document["components"]}).validate(
            instance
        )

    def _operation(self, request: httpx.Request) -> Mapping[str, Any] | None:
        path = request.url.path
        path = with_version({"type": "http", "path": path, "raw_path": b""})["path"]
        operations = self.document["paths"].get(path)
        if operations is None:
            patterns = {
                re.sub(r"{\w+}", "[^/]+", known): found
                for known, found in self.document["paths"].items()
            }
            matching = (
                found
                for pattern, found in patterns.items()
                if re.fullmatch(pattern, path, re.DOTALL)
            )
            operations = next(matching, {})
        method = "get" if request.method == "HEAD" else request.method.lower()
        found: Mapping[str, Any] | None = operations.get(method)
        return found
