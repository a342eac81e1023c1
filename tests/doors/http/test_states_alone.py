"""A server over models without attention, all of whose layers keep a state."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from kvlinker.settings import Settings, load_settings
from tests.doors.http.serving import MODEL_NAME, TEMPLATE, Served, serving, tiny_settings
from tests.toy_models import loaded_model

CHUNKS = (
    "Mira Holt lives in Varna, where she works as a baker. " * 2,
    "Tom Reyes lives in Oslo, where he works as a pilot. " * 2,
)


@contextmanager
def served_model(family: str, settings: Settings) -> Iterator[Served]:
    with serving(LLM.from_model(loaded_model(family), settings), settings) as served:
        yield served


def ask(served: Served, ids: list[str], **link: Any) -> dict[str, Any]:
    parts = [{"type": "context_cache", "id": each} for each in ids]
    body = {
        "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "Where?"}]}],
        "max_tokens": 6,
        "temperature": 0,
        "logprobs": True,
    }
    answer = served.post("/v1/chat/completions", body | ({"link": link} if link else {}))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]


def test_chunks_are_linked_survive_a_restart_and_heal(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, kv_slots=None)
    with served_model("mamba2-alone", settings) as served:
        ids = served.cache(*CHUNKS)
        first = ask(served, ids[::-1])
        details = first["usage"]["prompt_tokens_details"]
        assert details["recomputed_tokens"] == 4  # the first chunk is exact
        assert details["cached_tokens"] > 150
        served.llm.store.flush()
    with served_model("mamba2-alone", settings) as served:
        again = ask(served, ids[::-1])
        assert logprobs(again) == pytest.approx(logprobs(first), abs=3e-5)
        assert again["usage"] == first["usage"]
        for each in ids:
            record = served.llm.catalog.get(each, "default", time.time())
            assert record is not None
            served.llm.store.delete(record.chunk_key)
            assert served.get(f"/v1/context_caches/{each}").json()["tier"] is None
        healed = ask(served, ids[::-1])
        assert logprobs(healed) == pytest.approx(logprobs(first), abs=3e-5)
        for each in ids:
            assert served.get(f"/v1/context_caches/{each}").json()["tier"] == "host"


def test_what_needs_attention_is_refused_and_the_default_policy_needs_none(tmp_path: Path) -> None:
    settings = load_settings(state_dir=tmp_path, model=MODEL_NAME, chat_template=TEMPLATE)
    with served_model("mamba2-alone", settings) as served:
        assert served.llm.default_policy().name == "legolink-16"
        ids = served.cache(*CHUNKS)
        answer = ask(served, ids, explain=True, attention=True)
        assert answer["link"]["policy"] == "legolink-16"
        assert answer["link"]["explanation"]["attention"] is None
        for policy in ("query-5-sensitive", "cacheblend-15", "cachecraft-0.3", "h2o-15"):
            body = {
                "messages": [
                    {"role": "user", "content": [{"type": "context_cache", "id": ids[0]}]}
                ],
                "link": {"policy": policy},
            }
            refused = served.post("/v1/chat/completions", body)
            assert refused.status_code == 400
            assert "has no attention" in refused.json()["error"]["message"]
