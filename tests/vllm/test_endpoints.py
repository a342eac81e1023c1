"""kvlinker's routes in vLLM's own server: what a client sees is what kvlinker's server answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from kvlinker.config import Settings
from kvlinker.server.address import bind
from tests.server.serving import Served
from tests.vllm.conftest import vllm_settings_for

PART = {"type": "text", "text": "Where is the cat?"}


@pytest.fixture(scope="module")
def http(vllm_settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("endpoints")
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    listener.close()
    settings = vllm_settings_for(vllm_settings.model, folder / "state")
    connector = {
        "kv_connector": "KVLinkerConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "state_dir": str(settings.state_dir),
            "policy": settings.policy,
            "chat_template": settings.chat_template,
        },
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", settings.model]
    command += ["--dtype", "float32", "--enforce-eager", "--gpu-memory-utilization", "0.05", "--block-size", "32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-transfer-config", json.dumps(connector)]
    log = folder / "log"
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, env=os.environ | {"VLLM_PLUGINS": "kvlinker"}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                wait_until_up(client, server)
                yield client
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(timeout=60)
    assert "Traceback" not in log.read_text(), log.read_text()[-3000:]


def wait_until_up(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise TimeoutError("vLLM's server does not start")


def answer_of(client: Any, texts: list[str], **fields: Any) -> dict[str, Any]:
    """The same calls on either server."""
    created = client.post("/v1/context_caches", json={"chunks": texts}).json()
    parts = [{"type": "context_cache", "id": entry["id"]} for entry in created["data"]]
    body = {"messages": [{"role": "user", "content": [*parts, PART]}], "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body | {"ignore_eos": True} | fields)
    assert answer.status_code == 200, answer.text
    assert "link;dur=" in answer.headers["server-timing"]
    return {name: answer.json()[name] for name in ("choices", "usage")}


@pytest.mark.parametrize("policy", ["naive", "legolink-4", "cacheblend-40-onestep", "full"])
def test_both_servers_answer_alike(http: httpx.Client, served: Served, policy: str) -> None:
    texts = ["The cat sat on the mat. " * 5, "A dog and a small text. " * 4]
    link = {"policy": policy}
    assert answer_of(http, texts, link=link) == answer_of(served.http, texts, link=link)


def test_errors_are_kvlinkers(http: httpx.Client) -> None:
    missing = http.get("/v1/context_caches/cc_none")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "context_cache_not_found")
    refused = http.post("/v1/completions", json={"prompt": "a", "link": {"policy": "query-5"}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "link.policy")


def test_vllms_own_routes_stay(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    figures = http.get("/metrics").text
    assert "vllm:num_requests_running" in figures
    assert "kvlinker:store_bytes" in figures


def test_orders_of_others_are_not_followed(http: httpx.Client) -> None:
    """vLLM's own routes take them from anybody."""
    order = {"linked": 3, "placements": [], "runs": [[0, 3]], "captures": [{"key": "0" * 64, "begin": 0, "end": 3}]}
    body = {
        "input": "The cat sat on the mat",
        "max_output_tokens": 2,
        "cache_salt": "x",
        "kv_transfer_params": {"kvlinker": order},
    }
    http.post("/v1/responses", json=body)
    assert http.get("/status").json()["tiers"][1]["name"] == "disk"
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
