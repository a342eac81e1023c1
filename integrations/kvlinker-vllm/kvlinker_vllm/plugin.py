"""vLLM's entry point ``vllm.general_plugins``, which makes the connector known by name in every
process, has processes that do not start report why, and ends them with a server that is gone."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

NAME = "KVLinkerConnector"

FAILURE_FILE = "KVLINKER_VLLM_FAILURE_FILE"
"""The environment variable that names a file for the error by which one of vLLM's processes did not
start: vLLM itself reports to its front end only that it did not."""


ENGINE_CORE = "EngineCore"
"""The prefix of the names of the engine's own processes."""

WATCHER = "kvlinker-parent"
"""The name of the thread that waits for the server's end."""

END_SECONDS = 5.0
"""The seconds that an engine core has to end by itself: while it starts, it only notes signals."""


def register() -> None:
    """Register the connector with vLLM. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "kvlinker_vllm.connector", NAME)
    _log_as_vllm()
    failure, theirs = os.environ.get(FAILURE_FILE), logging.getLogger("vllm")
    if failure and not any(isinstance(each, FailureNote) for each in theirs.handlers):
        theirs.addHandler(FailureNote(Path(failure)))
    if failure:  # a start of kvlinker's own, which may end before there is a connector
        end_with_parent()


def end_with_parent() -> None:
    """End vLLM's engine core and its workers when the server that started them has ended.

    After ``kill -9``, or a signal while the engine starts, the engine core would otherwise go on,
    and keep its memory from the next server. Does nothing in other processes, nor when called
    again.
    """
    server = multiprocessing.parent_process()
    if server is None or not multiprocessing.current_process().name.startswith(ENGINE_CORE):
        return
    if any(thread.name == WATCHER for thread in threading.enumerate()):
        return

    def watch() -> None:
        server.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(END_SECONDS)
        os._exit(1)  # workers see that, and end, too

    threading.Thread(target=watch, name=WATCHER, daemon=True).start()


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
