"""Says of classes of models if vLLM links them, each in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from kvlinker.base.errors import InvalidRequestError
from kvlinker_lab.models.verdicts import Verdict

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}
"""The environment of vLLM: it runs in the calling process, and logs errors alone."""

PRELOADED = ["kvlinker_lab.models.vllm_comparison"]
"""The modules that all processes begin with, so that none of them imports vLLM again."""

SECONDS = 600
"""The most that one model may take, unless another limit is given."""


class VerdictsFile:
    """Keeps verdicts in a JSON file, so that an interrupted run goes on where it ended."""

    def __init__(self, path: Path | None) -> None:
        """Without a ``path`` nothing is kept. Raises InvalidRequestError for a file that has
        something else."""
        self._path = path
        self._verdicts: dict[str, Verdict] = {}
        if path is not None and path.exists():
            try:
                entries = json.loads(path.read_text(encoding="utf-8"))
                self._verdicts = {kind: Verdict(kind, **entry) for kind, entry in entries.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise InvalidRequestError(
                    f"{path} has no verdicts ({error}): name another file, or delete it."
                ) from error

    def get(self, kind: str) -> Verdict | None:
        """Return the verdict on this class; None where there is none yet."""
        return self._verdicts.get(kind)

    def add(self, verdict: Verdict) -> None:
        """Keep a verdict."""
        self._verdicts[verdict.kind] = verdict
        if self._path is not None:
            entries = {
                kind: {name: value for name, value in asdict(each).items() if name != "kind"}
                for kind, each in sorted(self._verdicts.items())
            }
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
            written.replace(self._path)


def verdicts_in_vllm(
    kinds: Sequence[str], kept: VerdictsFile, *, seconds: float = SECONDS
) -> Iterator[Verdict]:
    """Yield a verdict on each class, in order. Classes with a kept verdict are not tried again. A
    model may take ``seconds``."""
    os.environ.update(VARIABLES)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    for kind in kinds:
        verdict = kept.get(kind)
        if verdict is None:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_compare, args=(kind, theirs))
            process.start()
            theirs.close()
            verdict = _await_verdict(kind, process, ours, seconds)
            kept.add(verdict)
        yield verdict


def _await_verdict(
    kind: str, process: ForkServerProcess, connection: Connection, seconds: float
) -> Verdict:
    """Return what a process finds, and end it, with all processes that it has started."""
    try:
        if not connection.poll(seconds):
            return Verdict(kind, reason="not tried to the end here: it takes too long")
        verdict: Verdict = connection.recv()
    except EOFError:
        process.join(timeout=1)
        return Verdict(kind, reason=f"its process ended early (exit code {process.exitcode})")
    else:
        return verdict
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _compare(kind: str, connection: Connection) -> None:
    """Send the verdict on a class, from a process that leads a group of its own and says
    nothing."""
    from kvlinker_lab.models.vllm_comparison import verdict_in_vllm

    os.setsid()
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    connection.send(verdict_in_vllm(kind))
    connection.close()
