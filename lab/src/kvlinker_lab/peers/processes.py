"""Starts the processes that peers run in, in this environment or another."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.peers.peer import PeerKind, Task
from kvlinker_lab.peers.worker import Measured

_IS_INSTALLED = (
    "import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec,"
    " sys.argv[1:])))"
)


def parse_pythons(options: Sequence[str], programs: Collection[str]) -> dict[str, str]:
    """Read ``PROGRAM=PATH`` each, by program. Raises InvalidRequestError for an unknown program,
    and a missing file."""
    pythons = {}
    for option in options:
        name, _, path = option.partition("=")
        if name not in programs:
            raise InvalidRequestError(
                f"--python {option}: write PROGRAM=PATH, where PROGRAM is one of"
                f" {', '.join(sorted(programs))}.",
                param="python",
            )
        if not Path(path).is_file():
            raise InvalidRequestError(
                f"--python {option}: there is no file {path!r}.", param="python"
            )
        pythons[name] = path
    return pythons


def is_installed(kind: PeerKind, python: str) -> bool:
    """Say whether the environment of ``python`` has what the peer needs, kvlinker included."""
    return (
        subprocess.run(
            [python, "-c", _IS_INSTALLED, "kvlinker", *kind.modules], check=False
        ).returncode
        == 0
    )


def run_peer(task: Task, python: str) -> Measured:
    """Run a task in a process of its own, with the Python of an environment that has the peer.

    Raises InvalidRequestError with the end of what a failed process wrote.
    """
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as folder:
        asked, answered = Path(folder) / "task.json", Path(folder) / "result.json"
        asked.write_text(json.dumps(asdict(replace(task, started=time.time()))))
        run = subprocess.run(
            [python, "-m", f"{__package__}.worker", str(asked), str(answered)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            lines = (run.stderr or run.stdout).strip().splitlines() or [
                f"it ended with status {run.returncode}"
            ]
            raise InvalidRequestError(
                f"{task.peer} failed: {lines[-1]} Leave it out of --systems.", param="systems"
            )
        return Measured(**json.loads(answered.read_text()))
