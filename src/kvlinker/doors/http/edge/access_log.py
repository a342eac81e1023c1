"""The access log: a line for each request, without any of its content; and the thread that writes a
server's log."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from queue import Full, Queue
from threading import Thread
from typing import Literal, TextIO

from starlette.types import Scope

from kvlinker.doors.http.edge.errors import request_id_of

logger = logging.getLogger(__name__)

LEFT = 499
"""The status of a request whose client left before it had all of its answer, as nginx logs it."""

QUEUED_LINES = 10_000
"""The most lines that wait for a log that is not read; further ones are dropped."""

FLUSH_SECONDS = 1.0
"""The time that a server which ends gives to lines that wait."""


def note_tokens(scope: Scope, prompt: int, output: int = 0) -> None:
    """Note for the access log how many tokens a request brought, and how many it was answered
    with."""
    scope["state"]["tokens"] = (prompt, output)


def note_link(
    scope: Scope,
    *,
    cached: int,
    recomputed: int,
    fresh: int,
    reusable: int = 0,
    uncomputed: int = 0,
    ttft: float | None,
    policy: str,
) -> None:
    """Note for the access log how a prompt's tokens were computed, after how many seconds the first
    token came, None if none did, and the policy. ``reusable`` of the fresh tokens would be cached
    under another setting; ``uncomputed`` tokens were left when the client left."""
    scope["state"]["link"] = {
        "cached": cached,
        "recomputed": recomputed,
        "fresh": fresh,
        **({"reusable": reusable} if reusable else {}),
        **({"uncomputed": uncomputed} if uncomputed else {}),
        **({} if ttft is None else {"ttft_ms": round(ttft * 1000, 1)}),
        "policy": policy,
    }


def is_noted(scope: Scope) -> bool:
    """Return whether it is noted how a request's prompt was computed."""
    return "link" in scope["state"]


def note_replica(scope: Scope, replica: str) -> None:
    """Note for the access log which replica answered a request, and why that one."""
    scope["state"]["replica"] = replica


def note_route(scope: Scope, route: str) -> None:
    """Note for the access log the route of a request that is passed on."""
    scope["state"]["route"] = route


def log_request(scope: Scope, status: int | None, seconds: float) -> None:
    """Log method, route, status, tokens, milliseconds and the id of a request that has ended; of an
    answer also how its prompt was linked.

    The route is the template, such as ``/v1/context_caches/{cache_id}``, or ``-`` where there is
    none: paths are callers' text. The status is ``LEFT`` for clients that leave before they have
    all of the answer. Where there is none, ``JsonLines`` writes null.
    """
    state = scope["state"]
    prompt, output = state.get("tokens", (0, 0))
    request = {
        "method": scope["method"][:16],
        "route": getattr(scope.get("route"), "path_format", state.get("route")),
        "status": status,
        "prompt_tokens": prompt,
        "output_tokens": output,
        **state.get("link", {}),
        "ms": round(seconds * 1000, 1),
        "id": request_id_of(scope),
        **({"replica": state["replica"]} if "replica" in state else {}),
    }
    named = "".join(f" {name}=%s" for name in list(request)[3:])
    text = ("-" if value is None else value for value in request.values())
    logger.info(f"%s %s %s{named}", *text, extra={"request": request})


class JsonLines(logging.Formatter):
    """Formats a record as a line of JSON: ``time`` (UTC), ``level``, ``logger`` and ``message``;
    for a request also the figures of the access log, each in a separate field."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": super().format(record),
        }
        return json.dumps(fields | getattr(record, "request", {}))


@contextmanager
def logging_to_stderr(level: str, form: Literal["text", "json"] = "text") -> Iterator[None]:
    """Write the server's log to stderr, from ``level`` on, until the block ends: as lines of text,
    or of JSON.

    A thread writes it, so that requests do not wait for a terminal or a pipe that is full.
    """
    lines: Queue[logging.LogRecord | None] = Queue(QUEUED_LINES)
    output = _QuietOutput(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    output.setFormatter(JsonLines() if form == "json" else text)

    def write() -> None:
        while (record := lines.get()) is not None:
            output.handle(record)

    handler = _DroppingHandler(lines)
    levels = {"kvlinker": level.upper(), "uvicorn": "WARNING"}
    before = {name: logging.getLogger(name).level for name in levels}
    writer = Thread(target=write, name="kvlinker-log", daemon=True)
    writer.start()
    for name in levels:
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(levels[name])
    try:
        yield
    finally:
        for name in levels:
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(before[name])
        with suppress(Full):
            lines.put(None, timeout=FLUSH_SECONDS)
        writer.join(FLUSH_SECONDS)


class _QuietOutput(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Do nothing: failures of the log cannot be logged."""


class _DroppingHandler(QueueHandler):
    def enqueue(self, record: logging.LogRecord) -> None:
        with suppress(Full):
            super().enqueue(record)
