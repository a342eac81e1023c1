"""Serves a model that is measured, in this process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from kvlinker.base.errors import KVLinkerError

if TYPE_CHECKING:
    from kvlinker.llm import LLM


@contextmanager
def serve_llm(llm: LLM) -> Iterator[str]:
    """Serve an LLM on a free port of this machine, in a thread of its own; yield its address."""
    import uvicorn

    from kvlinker.doors.http.app import create_app
    from kvlinker.doors.http.edge.address import bind, url_of

    with closing(bind("127.0.0.1", 0)) as listening:
        app = create_app(llm, llm.settings)
        server = uvicorn.Server(
            uvicorn.Config(app, log_config=None, log_level="error", lifespan="off")
        )
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True
        )
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise KVLinkerError("The server did not start; its traceback is above.")
            time.sleep(0.01)
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join()
