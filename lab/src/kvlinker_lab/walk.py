"""Counts the Python code that a chat request runs through before its first kernel."""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import httpx

import kvlinker
from kvlinker.quality.bench.harness.benchmark import Repeat, Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker_lab.serving import serve_llm

COLUMNS = ("case", "files", "functions", "calls", "returns", "types", "cpu_ms")

QUIET_SECONDS = 0.5
"""The seconds without a kernel after which the server is taken to be idle; chosen by hand."""

_PACKAGE = f"{Path(kvlinker.__file__).parent}{os.sep}"


class _Tracer:
    """Records calls of kvlinker's functions in all threads that start after it is installed."""

    def __init__(self, last: tuple[CodeType, ...]) -> None:
        """Record until a function of ``last`` is called, each time after ``begin``."""
        self._last = last
        self._calls: list[tuple[int, CodeType]] = []
        self._types: set[type] = set()
        self._records = False

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def begin(self) -> None:
        self._calls.clear()
        self._types.clear()
        self._records = True

    def counts(self) -> Row:
        """Return the counts since ``begin``: ``files``, ``functions`` and ``calls`` of kvlinker;
        ``returns``, the calls in one thread from one file into another that this thread had left
        before; ``types``, the classes whose constructors in Python ran."""
        seen: dict[int, set[str]] = {}
        where: dict[int, str] = {}
        returns = 0
        for thread, code in self._calls:
            file = code.co_filename
            left = seen.setdefault(thread, set())
            returns += file != where.get(thread) and file in left
            left.add(file)
            where[thread] = file
        codes = {code for _, code in self._calls}
        return {
            "files": len({code.co_filename for code in codes}),
            "functions": len(codes),
            "calls": len(self._calls),
            "returns": returns,
            "types": len(self._types),
        }

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._records or event != "call":
            return
        code = frame.f_code
        if code in self._last:
            self._records = False
        elif code.co_filename.startswith(_PACKAGE):
            self._calls.append((threading.get_ident(), code))
            if code.co_name == "__init__":
                self._types.add(type(frame.f_locals["self"]))
        elif code.co_name == "__init__" and code.co_filename == "<string>":  # of a dataclass
            made = type(frame.f_locals[code.co_varnames[0]])
            if made.__module__.startswith("kvlinker."):
                self._types.add(made)


@benchmark("walk")
def walk(setup: Setup, *, repeat: Repeat = 15) -> Report:
    """Count the files, functions and calls of kvlinker that a chat request with two documents runs
    through before its first kernel: a first time, and again; and the processor's time of that,
    medians, with the client's.

    Counts are of one request, traced; times of others, which are not.
    """
    return run_walk(setup.subject(repeat=repeat), repeat=repeat)


def run_walk(subject: MeasuredModel, *, repeat: int) -> Report:
    """Count and time the walk of two chat requests, as ``walk`` says."""
    from kvlinker.engines.embedded.execution.compiled.compiled_step import CompiledStep
    from kvlinker.engines.embedded.execution.forward_pass import ForwardPass

    first = ((CompiledStep, "_run"), (ForwardPass, "attend"))
    tracer = _Tracer(tuple(getattr(owner, name).__code__ for owner, name in first))
    tracer.install()  # before the threads of the engine and the server begin
    try:
        with subject.llm() as llm, serve_llm(llm) as url, httpx.Client(base_url=url) as client:
            _ask(client, "warm up")()
            rows = [
                _row("cold", tracer, first, lambda: _ask(client, f"cold {time.time_ns()}"), repeat),
                _row("warm", tracer, first, lambda: _ask(client, "warm"), repeat),
            ]
    finally:
        tracer.remove()
    return replace(subject.report(rows), columns=COLUMNS)


def _ask(client: httpx.Client, name: str) -> Callable[[], object]:
    """Return a call that asks for one token about two documents, whose texts begin with a
    name."""
    documents = [
        {"text": f"{name} {index}. " + "Tom Reyes lives in Oslo. " * 16} for index in range(2)
    ]
    body = {
        "messages": [{"role": "user", "content": "Where does Tom Reyes live?"}],
        "documents": documents,
        "temperature": 0,
        "max_tokens": 1,
    }
    return lambda: client.post("/v1/chat/completions", json=body, timeout=600).raise_for_status()


def _row(
    case: str,
    tracer: _Tracer,
    first: tuple[tuple[type, str], ...],
    asking: Callable[[], Callable[[], object]],
    repeat: int,
) -> Row:
    asking()()  # so that the warm case is warm
    taken = []
    for _ in range(repeat):
        ask = asking()
        _await_idleness(first)
        with _first_calls(first) as called:
            started = time.process_time()
            ask()
        taken.append(1e3 * (called[0] - started))
    ask = asking()
    _await_idleness(first)
    tracer.begin()
    ask()
    return {"case": case, **tracer.counts(), "cpu_ms": statistics.median(taken)}


def _await_idleness(functions: tuple[tuple[type, str], ...]) -> None:
    """Wait until none of the functions is called for QUIET_SECONDS: a server computes chunks while
    no request runs."""
    called = [0.0]
    while called:
        with _first_calls(functions) as called:
            time.sleep(QUIET_SECONDS)


@contextmanager
def _first_calls(functions: tuple[tuple[type, str], ...]) -> Iterator[list[float]]:
    """Yield a list that gets the process's time, in seconds, of each call of the functions."""
    called: list[float] = []

    def time_function(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(time.process_time())
            return function(*args, **kwargs)

        return call

    first, second = (
        patch.object(owner, name, time_function(getattr(owner, name))) for owner, name in functions
    )
    with first, second:
        yield called
