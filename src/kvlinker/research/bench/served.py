"""A server of an LLM in this process, for benchmarks that speak HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn

from kvlinker.llm import LLM
from kvlinker.server.address import bind, url_of
from kvlinker.server.app import create_app


@contextmanager
def served(llm: LLM) -> Iterator[str]:
    """The app on a free port of this machine, in a thread of its own; yields its address."""
    with closing(bind("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(create_app(llm, llm.settings), log_level="error", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield url_of(listening)
        finally:
            server.should_exit = True
            thread.join()
