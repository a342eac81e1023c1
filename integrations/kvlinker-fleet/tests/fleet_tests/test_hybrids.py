"""Models whose layers keep a state, in a fleet: their chunks keep it, too, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.doors.http.serving import Served, serving, tiny_settings
from tests.toy_models import loaded_model
from tests.waiting import wait_until

from fleet_tests.test_routing_over_http import CHAT, TEXTS, asked, replica, routing, status
from kvlinker.doors.serving import builder_client
from kvlinker.llm import LLM

FAMILIES = ["qwen3_next-states", "granite-states-nope"]


@pytest.fixture(params=FAMILIES)
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Starts servers on one catalog, and one store of objects."""
    model = loaded_model(request.param)
    objects = f"file://{tmp_path / 'objects'}"
    with ExitStack() as stack:

        def start(**options: Any) -> Served:
            options = {"object_url": objects, "disk_space": 0, "dtype": "float32"} | options
            settings = tiny_settings(tmp_path, **options)
            llm = LLM.from_model(model, settings, builders=builder_client(settings))
            return stack.enter_context(serving(llm, settings))

        yield start


def loaded(server: Served) -> float:
    """How many chunks were loaded from the store of objects."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.http.get("/metrics").text)
        for sample in family.samples
        if sample.labels == {"result": "hit", "tier": "object"}
    )


def test_ids_and_texts_are_good_everywhere(start: Any, tmp_path: Path) -> None:
    servers = [start(), start()]
    with routing(tiny_settings(tmp_path / "router"), *(each.url for each in servers)) as router:
        made = router.post("/v1/context_caches", json={"chunks": TEXTS}).json()["data"]
        ids = [each["id"] for each in made]
        wait_until(lambda: sum(each["resident_chunks"] for each in status(router)) == len(TEXTS))
        for prompt in (asked(*ids), asked(*reversed(ids[:3]))):
            answer = router.post(CHAT, json=prompt)
            replica(answer)
            told = [each.post(CHAT, prompt).json()["choices"] for each in servers]
            assert told == [answer.json()["choices"]] * 2
        prompt = asked(documents=[{"text": text + "again"} for text in TEXTS[:3]])
        first = router.post(CHAT, json=prompt)
        replica(first)
        for each in servers:
            again = [each.post(CHAT, prompt).json() for _ in range(2)]
            assert [one["choices"] for one in again] == [first.json()["choices"]] * 2
            assert again[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_a_builder_built_is_loaded_with_its_states(start: Any) -> None:
    builder = start(role="build")
    server = start(role="serve", builders=[builder.url], build_tokens=64)
    prompt = asked(documents=[{"text": text} for text in TEXTS[:3]])
    answer = server.post(CHAT, prompt).json()
    assert loaded(server) > 0
    alone = start()
    assert answer["choices"] == alone.post(CHAT, prompt).json()["choices"]
    assert loaded(builder) == 0, "it computed them"
