"""kvlinker's routes in vLLM's own server: what a client sees is what kvlinker's server answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from kvlinker.config import Settings
from tests.server.serving import TEMPLATE, Served
from tests.vllm.conftest import vllm_settings_for
from tests.vllm.own_server import vllm_serving

PART = {"type": "text", "text": "Where is the cat?"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("endpoints")


@pytest.fixture(scope="module")
def http(vllm_settings: Settings, folder: Path) -> Iterator[httpx.Client]:
    settings = vllm_settings_for(Path(vllm_settings.model), folder / "state")
    extra = {
        "state_dir": str(settings.state_dir),
        "policy": settings.policy,
        "chat_template": settings.chat_template,
    }
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--dtype", "float32", "--chat-template", str(template))
    with (
        vllm_serving(settings.model, folder / "log", extra, *options) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


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


def test_other_apis_are_kvlinkers(http: httpx.Client) -> None:
    """vLLM has these routes, too, but cannot link."""
    text = {"type": "text", "text": "The cat sat on the mat. " * 5, "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [text]}], "max_tokens": 2}
    link = http.post("/v1/messages", json=body).json()["link"]
    assert len(link["context_caches"]) == 1
    answer = http.post("/v1/responses", json={"input": body["messages"], "max_output_tokens": 2}).json()
    assert [cache["id"] for cache in answer["link"]["context_caches"]] == [link["context_caches"][0]["id"]]


def test_vllms_own_routes_stay(http: httpx.Client) -> None:
    assert http.get("/version").json()["version"]
    figures = http.get("/metrics").text
    assert "vllm:num_requests_running" in figures
    assert "kvlinker:store_bytes" in figures


def test_transfer_plans_of_others_are_not_followed(http: httpx.Client, folder: Path) -> None:
    """vLLM's own routes take them from anybody."""
    transfer = {"linked": 3, "placements": [], "runs": [[0, 3]], "captures": [{"key": "0" * 64, "begin": 0, "end": 3}]}
    body = {"token_ids": [5, 6, 7, 8], "sampling_params": {"max_tokens": 2}, "cache_salt": "x"}
    for signature in (None, "0" * 64, "é"):
        params = {"kvlinker": transfer, "kvlinker_signature": signature}
        answer = http.post("/inference/v1/generate", json=body | {"kv_transfer_params": params})
        assert answer.status_code == 200, answer.text
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200
    chunks = folder / "state" / "chunks"
    assert list(chunks.glob("*/*.safetensors"))  # those of the tests above
    assert not (chunks / "00" / f"{'0' * 64}.safetensors").exists()
