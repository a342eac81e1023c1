"""vLLM's entry point ``vllm.general_plugins``, which makes the connector known by name in every
process, and has processes that do not start report why."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

NAME = "KVLinkerConnector"

FAILURE_FILE = "KVLINKER_VLLM_FAILURE_FILE"
"""The environment variable that names a file for the error by which one of vLLM's processes did not
start: vLLM itself reports to its front end only that it did not."""


def register() -> None:
    """Register the connector with vLLM. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvlinker.engines.vllm.connector", NAME)
    _log_as_vllm()
    failure, theirs = os.environ.get(FAILURE_FILE), logging.getLogger("vllm")
    if failure and not any(isinstance(each, FailureNote) for each in theirs.handlers):
        theirs.addHandler(FailureNote(Path(failure)))


class FailureNote(logging.Handler):
    """Writes the first exception that vLLM's processes log into a file, in one line."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's exception unless one was written, or the start is over."""
        if record.exc_info is None or record.exc_info[1] is None:
            return
        error = record.exc_info[1]
        with suppress(OSError), self._path.open("x", encoding="utf-8") as file:
            file.write(" ".join(f"{type(error).__name__}: {error}".split()))


def _log_as_vllm() -> None:
    """Format kvlinker's messages like vLLM's, with time and level, in processes that have no other
    handler for them."""
    own, theirs = logging.getLogger("kvlinker"), logging.getLogger("vllm")
    if not own.hasHandlers():
        own.setLevel(theirs.level)
        for handler in theirs.handlers:
            own.addHandler(handler)
