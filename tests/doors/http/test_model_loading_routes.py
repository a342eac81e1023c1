"""The models that a server can load, and the request to load one; tests/cli has the loading."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlinker.llm import LLM
from kvlinker.settings.model import BUNDLED_MODEL
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings


@pytest.fixture(scope="module")
def switching(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(
        tmp_path_factory.mktemp("switching"), api_keys=("one",), admin_keys=("root",)
    )
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_only_admins_see_and_load_models(switching: Served) -> None:
    known = switching.get("/v1/models/known", headers=bearer("one"))
    assert (known.status_code, known.json()["error"]["code"]) == (403, "permission_denied")
    body = {"model": str(BUNDLED_MODEL)}
    assert switching.post("/v1/models/load", body, headers=bearer("one")).status_code == 403


def test_the_models_of_the_machine_are_known(switching: Served) -> None:
    told = switching.get("/v1/models/known", headers=bearer("root")).json()
    (bundled,) = [each for each in told["data"] if each["name"] == str(BUNDLED_MODEL)]
    assert bundled["window"] == 4096
    assert bundled["nbytes"] == sum(each.stat().st_size for each in BUNDLED_MODEL.iterdir())
    assert "safetensors" in bundled["weights"]
    assert bundled["is_loaded"] is False
    assert told["failure"] is None


def test_no_path_is_loaded_that_is_not_known(switching: Served, tmp_path: Path) -> None:
    answer = switching.post("/v1/models/load", {"model": str(tmp_path)}, headers=bearer("root"))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "model_not_found"
    assert switching.get("/health").json() == {"status": "ok"}


def test_requests_that_are_running_are_told_to_their_tenant(switching: Served) -> None:
    """While they are; then they are among the last ones, with their speed."""
    body = {"prompt": "Tell me", "max_tokens": 800, "stream": True, "ignore_eos": True}
    with switching.http.stream("POST", "/v1/completions", json=body, headers=bearer("one")) as told:
        next(told.iter_lines())
        status = switching.get("/status", headers=bearer("one")).json()
        (running,) = status["running"]
        assert running["tenant"].startswith("key-")
        assert running["prompt_tokens"] > 0
        assert running["seconds"] >= 0
        told.read()
    status = switching.get("/status", headers=bearer("root")).json()
    assert status["running"] == []
    (recent,) = status["recent"]
    assert recent["tenant"] == running["tenant"]
    assert recent["tokens_per_second"] > 0
    assert recent["output_tokens"] == 800
    assert status["parameters"] > 1000
    assert status["memory_bytes"] > 10_000_000


def test_loading_begins_with_the_end_of_requests(switching: Served) -> None:
    """The last test of this server, which takes no requests from here on."""
    body = {"model": str(BUNDLED_MODEL)}
    answer = switching.post("/v1/models/load", body, headers=bearer("root"))
    assert (answer.status_code, answer.json()) == (202, body)
    health = switching.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
