"""Makes measurements beside other work on the machine a benchmark: its options, its processes and
its rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlinker.base import machine
from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.threads import SPINS, SPINS_VARIABLE, WAITING_VARIABLE
from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Repeat,
    Setup,
    benchmark,
    names,
)
from kvlinker.quality.bench.harness.report import Report, Row, describe_machine, versions
from kvlinker_lab.contention.disturbances import BUSY, control_group, paused_processes
from kvlinker_lab.contention.systems import IN_VLLM, KVLINKER, LLAMA_CPP, MEASURED, SYSTEMS, Task
from kvlinker_lab.peers.peer import find_peer
from kvlinker_lab.peers.processes import is_installed, parse_pythons

COLUMNS = (
    "system",
    "waiting",
    "beside",
    *(f"{name}_ms" for name in MEASURED),
    *(f"{name}_ratio" for name in MEASURED),
)
IDLE, QUOTA, ANOTHER, CREATING = "idle", "quota", "another", "creating"
BESIDE = (IDLE, "busy", "arriving", QUOTA, ANOTHER, CREATING)
PROCESSORS = 1.5
"""The processors whose time a control group has: not a whole number, so that threads that compute
together run out of it."""

WITHOUT_END, PASSIVE = "endless", "passive"


@benchmark("contention")
def contention(
    setup: Setup,
    *,
    beside: Annotated[
        str,
        typer.Option(
            help="What to measure beside, with commas between: nothing; a busy process per"
            " processor, from the beginning or arriving in the middle; a quota of 1.5 processors;"
            " another engine that answers; chunks that the same engine creates."
        ),
    ] = ",".join(BESIDE),
    gguf: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="The model's GGUF file, for llama.cpp."),
    ] = None,
    python: Annotated[
        list[str] | None,
        typer.Option(
            help="PROGRAM=PATH: Python of the environment that vllm or llama.cpp is installed in."
        ),
    ] = None,
    waiting: Annotated[
        str,
        typer.Option(
            help="How kvlinker's threads wait: endless, as OpenMP does by itself; passive; or after"
            " how many turns they sleep. With commas between."
        ),
    ] = str(SPINS),
    chunks: Chunks = 4,
    chunk_tokens: ChunkTokens = 450,
    fresh_tokens: FreshTokens = 16,
    repeat: Repeat = 3,
) -> Report:
    """Measure first tokens by policy, and the time per token of an answer, beside other work.

    Each system, kvlinker, kvlinker in vLLM and llama.cpp, runs in a process of its own, in which
    all that is beside takes its turn. The quota has another process, which starts with it. Ratios
    are to the system's first row.
    """
    import torch

    disturbances = [IDLE, *(name for name in dict.fromkeys(names(beside)) if name != IDLE)]
    if unknown := set(disturbances) - set(BESIDE):
        raise InvalidRequestError(
            f"Unknown disturbance {min(unknown)!r}; known are {', '.join(BESIDE)}.", param="beside"
        )
    programs = {find_peer(name).program for name in SYSTEMS} - {""}
    pythons = parse_pythons(python or (), programs)
    task = Task(
        KVLINKER,
        None if setup.shape else str(setup.settings.model),
        setup.shape,
        (chunks, chunk_tokens, fresh_tokens),
        repeat,
    )
    cases = [_Case(task, sys.executable, wait) for wait in names(waiting)]
    warnings = []
    for system, model, wait in (
        (IN_VLLM, task.model, str(SPINS)),
        (LLAMA_CPP, None if gguf is None else str(gguf), WITHOUT_END),
    ):
        kind = find_peer(system)
        interpreter = pythons.get(kind.program, sys.executable)
        if not is_installed(kind, interpreter):
            warnings.append(f"{system} is left out, for it is not installed: {kind.installation}.")
        elif system == LLAMA_CPP and gguf is None:
            warnings.append(f"{system} is left out: name the model's file by --gguf.")
        else:
            cases.append(_Case(replace(task, system=system, model=model), interpreter, wait))
    rows: list[Row] = []
    usual: dict[str, Row] = {}
    with ExitStack() as stack:
        group = None
        if QUOTA in disturbances:
            disturbances.remove(QUOTA)
            try:
                group = str(stack.enter_context(control_group(PROCESSORS)))
            except InvalidRequestError as error:
                warnings.append(f"{QUOTA} is left out. {error}")
        setup.progress("starting what is beside")
        busy = stack.enter_context(paused_processes([BUSY] * machine.processors()))
        answering = [_command(sys.executable, "answer", task)] if ANOTHER in disturbances else []
        another = stack.enter_context(paused_processes(answering))
        for done, case in enumerate(cases):
            system = case.task.system
            setup.progress(f"{system}, {case.waiting}", done, len(cases))
            measured = case.run(
                disturbances=tuple(
                    name for name in disturbances if (system, name) != (LLAMA_CPP, CREATING)
                ),
                busy=tuple(busy),
                another=tuple(another),
            )
            if group is not None:
                measured |= case.run(disturbances=(QUOTA,), group=group)
            for name, times in measured.items():
                first = usual.setdefault(system, times)
                rows.append(
                    {"system": system, "waiting": case.waiting, "beside": name}
                    | {f"{each}_ms": times[each] for each in times}
                    | {f"{each}_ratio": times[each] / first[each] for each in times}
                )
    return Report(
        setup.command,
        describe_machine(torch.device("cpu")),
        versions(),
        {
            "model": task.shape or task.model,
            "gguf": gguf,
            "workload": task.workload,
            "repeat": repeat,
        },
        rows,
        COLUMNS,
        warnings=warnings,
    )


@dataclass(frozen=True)
class _Case:
    """Runs a task in the Python of an environment, whose threads wait in some way."""

    task: Task
    python: str
    waiting: str

    def run(self, **beside: Any) -> dict[str, dict[str, float]]:
        """Return milliseconds by disturbance and measurement. Raises InvalidRequestError with the
        end of what a failed process wrote."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in {SPINS_VARIABLE, WAITING_VARIABLE}
        }
        if self.waiting == PASSIVE:
            environment[WAITING_VARIABLE] = "passive"
        elif self.waiting != WITHOUT_END:
            environment[SPINS_VARIABLE] = self.waiting
        process = subprocess.run(
            _command(self.python, "measure", replace(self.task, **beside)),
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            raise InvalidRequestError(f"A measurement failed: {process.stderr[-500:]}")
        measured: dict[str, dict[str, float]] = json.loads(process.stdout.splitlines()[-1])
        return measured


def _command(python: str, do: str, task: Task) -> list[str]:
    return [python, "-m", "kvlinker_lab.contention.worker", do, json.dumps(asdict(task))]
