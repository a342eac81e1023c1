"""The steps of a first hour on a GPU: each a process of its own, so that the others go on where one
fails or hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvlinker_lab.load.servers import COMMAND

LAB = (sys.executable, "-c", "from kvlinker_lab.cli import app; app()")
"""Runs the laboratory's command line, in whichever folder it was installed."""

SHORTEST = 20.0
"""Seconds under which a step is not begun."""

LAST_LINES = 5
"""The lines of a failed step's output that are reported."""

POLICIES = "full,naive,legolink-16,query-5-sensitive"
CHUNK_TOKENS = "512"
"""The tokens of a chunk, as the benchmarks have them by default."""

IN_VLLM = ("vllm", "kvlinker_vllm")
"""The modules without which kvlinker does not run in vLLM."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of the report, which one process computes."""

    name: str
    command: Sequence[str]
    """Without the file that it writes its results to, which comes last."""

    seconds: float
    """The longest that it may take."""

    needs: Sequence[str] = ()
    """The modules without any of which it is left out."""

    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a step: ``done``, ``failed``, ``too late`` or ``left out``."""

    name: str
    outcome: str
    seconds: float = 0.0
    command: str = ""
    message: str = ""
    results: Sequence[Mapping[str, Any]] = ()


def first_hour(shape: str, *, tiny: bool) -> list[Step]:
    """Return the steps for models of this shape; ``tiny`` ones take seconds on a CPU."""
    sizes = {"chunks": "2", "chunk-tokens": "32"} if tiny else {"chunks": "32"}
    bench = (*COMMAND, "bench")
    common = ("--shape", shape, *(part for name in sizes for part in (f"--{name}", sizes[name])))
    once = ("--repeat", "1") if tiny else ()
    policies = ("--policies", "full,naive" if tiny else POLICIES)
    load = ("--rates", "2", "--requests", "4", "--output-tokens", "4") if tiny else ()
    steps = 4 if tiny else 24
    batches = ("--batches", "1" if tiny else "1,16", "--steps", str(steps))
    interpreted = {"TRITON_INTERPRET": "1"} if tiny else {}
    blended = sizes["chunks"], sizes.get("chunk-tokens", CHUNK_TOKENS)
    return [
        Step("kernels", _module("kernels"), 120, ("triton",), interpreted),
        Step("exactness", _module("exactness", "embedded"), 60),
        Step("exactness in vLLM", _module("exactness", "vllm"), 180, IN_VLLM),
        Step("ttft", (*bench, "ttft", *common, *policies, *once, "--json"), 480),
        Step("decode", (*bench, "decode", *common, *batches, *once, "--json"), 240),
        Step("load", (*LAB, "load", *common, *policies, *load, "--json"), 300),
        Step(
            "ttft in vLLM",
            (*bench, "ttft-vllm", *common, *policies, *once, "--json"),
            480,
            IN_VLLM,
        ),
        Step(
            "load in vLLM",
            (*LAB, "load", *common, *policies, *load, "--engine", "vllm", "--json"),
            300,
            IN_VLLM,
        ),
        Step("blending in LMCache", _module("lmcache", shape, *blended), 240, ("lmcache",)),
    ]


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module beside this one."""
    return sys.executable, "-m", f"kvlinker_lab.gpu.{name}", *arguments


def run(steps: Sequence[Step], folder: Path, seconds: float) -> Iterator[Outcome]:
    """Run the steps one after another, for ``seconds`` in all, and yield their outcomes. Each
    step's output goes to files in the folder."""
    end = time.monotonic() + seconds
    for number, step in enumerate(steps, 1):
        left = min(step.seconds, end - time.monotonic())
        missing = [module for module in step.needs if find_spec(module) is None]
        if missing:
            yield Outcome(step.name, "left out", message=f"{missing[0]} is not installed")
        elif left < SHORTEST:
            yield Outcome(step.name, "left out", message="no time was left")
        else:
            yield _run(step, folder / f"{number}-{step.name.replace(' ', '-')}", left)


def _run(step: Step, file: Path, seconds: float) -> Outcome:
    results, log = file.with_suffix(".json"), file.with_suffix(".log")
    results.unlink(missing_ok=True)  # another run's
    command = [*step.command, str(results)]
    began = time.monotonic()
    with (
        log.open("w") as output,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | step.environment,
            start_new_session=True,
        ) as process,
    ):
        try:
            outcome = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            outcome = "too late"
        finally:
            with suppress(ProcessLookupError):  # what it has started, too
                os.killpg(process.pid, 9)
    lines = log.read_text(errors="replace").strip().splitlines()
    rows: Sequence[Mapping[str, Any]] = ()
    with suppress(FileNotFoundError, ValueError):  # not written, or not to its end
        rows = json.loads(results.read_text())["results"]
    return Outcome(
        step.name,
        outcome,
        time.monotonic() - began,
        " ".join(command),
        "" if outcome == "done" else "\n".join(lines[-LAST_LINES:]),
        rows,
    )
