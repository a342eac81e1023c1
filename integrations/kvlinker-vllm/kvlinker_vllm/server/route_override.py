"""Decides whether vLLM or kvlinker answers a request in vLLM's own server: kvlinker, if it contains
context caches."""

from __future__ import annotations

import json
from typing import Any

from fastapi import FastAPI
from starlette.routing import BaseRoute, Match
from starlette.types import Receive, Scope, Send

from kvlinker.base.types.messages import MARKS
from kvlinker.doors.http.edge.guards import with_version
from kvlinker_vllm.server.forwarding import read_body, replay_body

OUTER = "kvlinker.outer"
"""The key in a scope under which kvlinker's application finds the one that vLLM's application
had."""

_PASSED = "kvlinker.passed"

_CONTENT = ("messages", "prompt", "input", "system", "tools")
_HINTS = tuple(f'"{word}"'.encode() for word in ("link", "context_cache", *MARKS))


def is_linked(body: bytes) -> bool:
    """Return whether a request asks for linking: has a field ``link``, a context cache, or a text
    or a tool that is marked as one."""
    if not any(hint in body for hint in _HINTS):
        return False
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return False
    if not isinstance(fields, dict):
        return False
    return fields.get("link") is not None or any(_has_chunk(fields.get(name)) for name in _CONTENT)


def _has_chunk(value: Any) -> bool:
    """Return whether messages, or parts of content, have a context cache or a mark among them."""
    if isinstance(value, list):
        return any(map(_has_chunk, value))
    if not isinstance(value, dict):
        return False
    marked = any(value.get(mark) is not None for mark in MARKS)
    return marked or value.get("type") == "context_cache" or _has_chunk(value.get("content"))


class RouteOverride(BaseRoute):
    """Stands before all routes of vLLM's application, and takes requests to kvlinker's: to routes
    that vLLM has none for, and of those that both have, the ones that ask for linking."""

    def __init__(self, outer: FastAPI) -> None:
        self._outer = outer
        self.app: FastAPI | None = None
        """kvlinker's application; None before it is started."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self.app is None or scope["type"] != "http" or _PASSED in scope:
            return Match.NONE, {}
        asked = self._with_version(scope)
        if self._is_vllms(asked) and scope["method"] != "POST":
            return (Match.NONE if asked is scope else Match.FULL), {}
        own = max(
            (route.matches(asked)[0] for route in self.app.router.routes),
            key=_rank,
            default=Match.NONE,
        )
        return own, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.app is not None
        scope = self._with_version(scope)
        if self._is_vllms(scope):
            body = await read_body(receive)
            receive = replay_body(body, receive)
            if scope["method"] != "POST" or not is_linked(body):
                return await self.pass_on(scope, receive, send)
        return await self.app({**scope, OUTER: scope}, receive, send)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer by vLLM's own route. ``scope`` is the one that vLLM's application had."""
        await self._outer.router({**scope, _PASSED: True}, receive, send)

    def _with_version(self, scope: Scope) -> Scope:
        """Return the scope with ``/v1`` where that was left out, unless vLLM has such a route."""
        return scope if self._is_vllms(scope) else with_version(scope)

    def _is_vllms(self, scope: Scope) -> bool:
        return any(
            route.matches(scope)[0] is Match.FULL
            for route in self._outer.router.routes
            if route is not self
        )


def _rank(match: Match) -> int:
    return match.value
