"""Starts ``kvlinker serve`` in a process of its own, and watches the memory of servers."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from kvlinker.settings import Settings
from kvlinker_lab.load.endpoint import ServerFailedError

START_SECONDS = 900.0
"""The longest wait for a server to answer, in seconds: large models are read and compiled
before."""

STOP_SECONDS = 60.0
"""The longest wait for a server to end after SIGTERM, in seconds. Chosen by hand."""

COMMAND = (sys.executable, "-c", "from kvlinker.cli import app; app()")
"""Runs kvlinker's command line, whatever is on the path."""
_POLL_SECONDS = 0.1
"""The seconds between two looks whether a server answers."""

_SAMPLE_SECONDS = 0.5
"""The seconds between two readings of resident memory."""

_LAST_WORDS = 10
"""The lines of a server's output that are shown if it does not start."""

# What was asked before must not change what is measured now, and neither must other servers.
_FIXED: Mapping[str, Any] = MappingProxyType(
    {
        "host": "127.0.0.1",
        "port": 0,
        "api_keys": "",
        "admin_keys": "",
        "max_variants": 0,
        "redis_url": "",
        "object_space": 0,
        "keep_answers": "off",
        "require_certificate": False,
    }
)


@dataclass(slots=True)
class Server:
    """Names a server that runs."""

    url: str
    process: psutil.Process | None = None
    """Its process, which another takes the place of when it is restarted; None if that is not
    known."""
    state_dir: Path | None = None
    """The folder with its chunk files and its catalog; None if that is not known."""
    log: Path | None = None
    """The file with its output; None if that is not known."""
    command: Sequence[str] = ()
    """The command that starts it again at the same address; empty if that is not known."""

    def restart(self) -> int:
        """Stop the server by SIGTERM, start it again when it has ended, and return its exit status.

        Raises ServerFailedError if it does not end within ``STOP_SECONDS``, or does not start
        again.
        """
        assert self.process is not None
        assert self.log is not None
        self.process.terminate()
        try:
            status = self.process.wait(STOP_SECONDS)
        except psutil.TimeoutExpired:
            raise ServerFailedError(
                f"kvlinker serve did not end within {STOP_SECONDS:g} s of SIGTERM."
            ) from None
        self.process = _start(self.command, self.log)
        _wait_until_up(self.process, self.log, self.url)
        return int(status or 0)


@contextmanager
def kvlinker_server(settings: Settings, **options: Any) -> Iterator[Server]:
    """Serve the model of ``settings`` in a process of its own, with a new state directory, until
    the context ends.

    ``options`` are further settings. Anything else comes from the environment and the configuration
    file, as always. Raises ServerFailedError if it does not start.
    """
    named = {
        name: getattr(settings, name) for name in ("model", "engine", "dtype", "device", "threads")
    }
    vllm_options = settings.vllm_options | options.pop("vllm_options", {})
    with tempfile.TemporaryDirectory(prefix="kvlinker-load-", ignore_cleanup_errors=True) as folder:
        log = Path(folder) / "output.txt"
        state_dir = Path(folder) / "state"
        places = {"state_dir": state_dir, "catalog_url": f"sqlite:///{state_dir}/catalog.sqlite"}
        given = {**named, **_FIXED, **places, **options}
        if vllm_options:
            given["vllm_options"] = json.dumps(vllm_options)
        flags = [_flag(name, value) for name, value in given.items() if value is not None]
        command = [*COMMAND, "serve", *flags]
        process = _start(command, log)
        server = Server("", process, state_dir, log)
        try:
            server.url = _wait_until_up(process, log)
            server.command = [*command, f"--port={urlsplit(server.url).port}"]
            yield server
        finally:
            _stop(server.process or process)


def _flag(name: str, value: Any) -> str:
    """Return the option that gives a setting its value."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option}={value}"


@contextmanager
def model_to_serve(settings: Settings, shape: str | None) -> Iterator[Settings]:
    """Write random weights of a shape into a folder, and name it in the settings; without a shape,
    change nothing.

    Raises InvalidRequestError for an unknown shape.
    """
    if shape is None:
        yield settings
        return
    from kvlinker.engines.contract.model_files import choose_device, choose_dtype
    from kvlinker.quality.bench.harness.shapes import random_model

    device = choose_device(settings.device)
    with tempfile.TemporaryDirectory(prefix="kvlinker-load-") as folder:
        model = Path(folder) / shape
        loaded = random_model(shape, dtype=choose_dtype(settings.dtype, device), device=device)
        loaded.model.save_pretrained(model)
        loaded.tokenizer.save_pretrained(model)
        del loaded  # the servers need the memory
        yield settings.model_copy(update={"model": str(model)})


def _start(command: Sequence[str], log: Path) -> psutil.Popen:
    """Start a server that appends to its ``log``."""
    with log.open("ab") as output:
        return psutil.Popen(command, stdout=output, stderr=output)


def _wait_until_up(started: psutil.Process, log: Path, url: str | None = None) -> str:
    """Wait until a server answers, and return its address: ``url``, or what its log says."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        said = log.read_text(encoding="utf-8", errors="replace")
        if not _runs(started):
            break
        found = re.search(r"address\s+(http://[\d.:]+)", said)
        if address := url or (found and found[1]):
            with suppress(httpx.TransportError):
                if httpx.get(f"{address}/health", timeout=5.0).is_success:
                    return address
        time.sleep(_POLL_SECONDS)
    why = f"did not answer within {START_SECONDS:g} s" if _runs(started) else "did not start"
    last = "\n".join(said.strip().splitlines()[-_LAST_WORDS:])
    raise ServerFailedError(f"kvlinker serve {why}; it said last: {last or 'nothing'}")


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _stop(process: psutil.Process) -> None:
    """End a server and all processes that it started."""
    with suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        process.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()


class PeakMemory:
    """Watches the resident memory of a server and its children, from a thread, while the context
    lasts."""

    def __init__(self, process: psutil.Process | None) -> None:
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._most = 0

    @property
    def megabytes(self) -> float | None:
        """The most that was seen so far; None if the process is not known."""
        return None if self._process is None else self._most / 1e6

    def __enter__(self) -> PeakMemory:
        if self._process is not None:
            self._most = resident_bytes(self._process)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._process is not None:
            self._thread.join()

    def _watch(self) -> None:
        assert self._process is not None
        while not self._ended.wait(_SAMPLE_SECONDS):
            self._most = max(self._most, resident_bytes(self._process))


def resident_bytes(process: psutil.Process) -> int:
    """Return what a process and its children have resident; pages that several of them share count
    for each."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        for one in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += one.memory_info().rss
    return total
