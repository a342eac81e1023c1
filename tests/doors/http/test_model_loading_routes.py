"""The models that a server can load, and the request to load one; tests/cli has the loading."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from kvlinker.doors.http.answers.answering import Choices
from kvlinker.doors.http.models import RecentRequests
from kvlinker.llm import LLM
from kvlinker.settings.settings import BUNDLED_MODEL
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


class Begun:
    """Choices of a request of 30 tokens, which has been answered with 5."""

    ended = False
    output_tokens = 5

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.began = time.monotonic() - 2
        policy = SimpleNamespace(name="naive")
        self.prompts = {"prompt": SimpleNamespace(prompt=range(30), policy=policy)}


def test_requests_that_are_running_are_told_to_their_tenant() -> None:
    recent = RecentRequests()
    one, two = Begun("one"), Begun("two")
    for each in (one, two):
        recent.begin(cast(Choices, each))
    (told,) = recent.running("one")
    assert told.seconds >= 2
    assert told.model_dump(exclude={"seconds"}) == {
        "tenant": "one",
        "policy": "naive",
        "prompt_tokens": 30,
        "output_tokens": 5,
    }
    assert len(recent.running(None)) == 2
    one.ended = True
    assert recent.running("one") == []


def test_the_last_requests_tell_whose_and_how_fast(switching: Served) -> None:
    body = {"prompt": "Tell me", "max_tokens": 20, "ignore_eos": True}
    assert switching.post("/v1/completions", body, headers=bearer("one")).status_code == 200
    status = switching.get("/status", headers=bearer("root")).json()
    (recent,) = status["recent"]
    assert recent["tenant"].startswith("key-")
    assert recent["tokens_per_second"] > 0
    assert status["running"] == []
    assert status["parameters"] > 1000
    assert status["memory_bytes"] > 10_000_000


def test_loading_begins_with_the_end_of_requests(switching: Served) -> None:
    """The last test of this server, which takes no requests from here on."""
    body = {"model": str(BUNDLED_MODEL)}
    answer = switching.post("/v1/models/load", body, headers=bearer("root"))
    assert (answer.status_code, answer.json()) == (202, body)
    health = switching.get("/health")
    assert (health.status_code, health.json()) == (503, {"status": "draining"})
