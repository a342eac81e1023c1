"""vLLM's own server, as users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from kvlinker.doors.http.edge.address import bind
from vllm_tests.conftest import OPTIONS

START_SECONDS = 600
"""The seconds that a server may take to start, on a machine that has much else to do."""


@contextmanager
def vllm_serving(
    model: str | Path, log: Path, extra: Mapping[str, Any], *options: str
) -> Iterator[str]:
    """Its URL. ``extra``: what kvlinker's connector is told. Nothing may fail in it until it is
    told to stop, when vLLM may complain about its own processes."""
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    connector = {
        "kv_connector": "KVLinkerConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += [
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        str(OPTIONS["kv_cache_memory_bytes"]),
        "--block-size",
        "32",
        *options,
    ]
    command += [
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--kv-transfer-config",
        json.dumps(connector),
    ]
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            env=os.environ | {"VLLM_PLUGINS": "kvlinker"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            _wait_until_up(url, server)
            yield url
            told = log.read_text()
            assert "Traceback" not in told, told[-3000:]
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)


def _wait_until_up(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError("vLLM's server does not start")
