"""Models with latent attention and indexers, and whose layers keep a state, over HTTP: from their
files, with linked chunks, through a restart and damage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvlinker.llm import LLM
from kvlinker.store.loading import prompt_load
from kvlinker.store.loading.bandwidths import Bandwidths
from tests.doors.http.serving import Served, serving, tiny_settings
from tests.field_models import FIELD_MODELS

TEXTS = ["The kettle stands on the stove, which is cold. ", "Nobody has been in the kitchen. " * 3]

NAMES = [
    *("DeepSeek V3", "DeepSeek V3.2", "GLM-5.3-Flash"),
    *("Qwen3.5 0.8B", "Granite 4.0 H 1B", "LFM2 1.2B", "Jamba Mini 1.7"),
    "Falcon Mamba 7B",
]


@contextmanager
def served_from(folder: Path) -> Iterator[Served]:
    settings = tiny_settings(
        folder / "state",
        model=str(folder / "model"),
        chat_template=None,
        dtype="float32",
        host_memory=0,
        max_model_len=1024,
    )
    with LLM.from_settings(settings) as llm, serving(llm, settings, closes=False) as served:
        yield served


def ask(served: Served, content: list[Any] | str, policy: str) -> tuple[str, dict[str, int]]:
    """The answer's text, and its usage."""
    response = served.post(
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": content}],
            "link": {"policy": policy},
            "max_tokens": 8,
            "temperature": 0,
        },
    )
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    details = usage["prompt_tokens_details"] | {"prompt_tokens": usage["prompt_tokens"]}
    return answer["choices"][0]["message"]["content"], details


@pytest.mark.whole
@pytest.mark.parametrize("name", NAMES)
def test_a_server_of_a_model_in_another_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_load, "LEAST_DEADLINE_SECONDS", 10.0)
    monkeypatch.setattr(Bandwidths, "worth_loading", lambda *_: True)
    FIELD_MODELS[name].save(tmp_path / "model")
    question = "Where is the kettle?"
    with served_from(tmp_path) as served:
        ids = served.cache(*TEXTS)
        linked = [{"type": "context_cache", "id": each} for each in reversed(ids)]
        linked.append({"type": "text", "text": question})
        plain, usage = ask(served, TEXTS[1] + TEXTS[0] + question, "full")
        assert ask(served, linked, "full")[0] == plain
        told = [served.get(f"/v1/context_caches/{each}").json() for each in ids]
        cached = sum(each["tokens"] for each in told)
        answers = {}
        policies = ["naive", "legolink-4", "random-30"]
        if served.llm.engine.kv_bytes_per_token:  # else it has no attention
            policies += ["query-20", "cacheblend-30"]
        for policy in policies:
            answers[policy], details = ask(served, linked, policy)
            assert details["prompt_tokens"] == usage["prompt_tokens"]
            kept = cached - details["recomputed_tokens"]
            assert details["cached_tokens"] == kept > 0, policy
        served.llm.store.flush()
        files = sorted((tmp_path / "state").rglob("*.safetensors"))
        assert len(files) == 2
        wanted = sum(served.llm.engine.kv_bytes(each["tokens"]) for each in told)
        assert wanted < sum(file.stat().st_size for file in files) < 1.5 * wanted + 20_000
    with served_from(tmp_path) as served:
        for policy, text in answers.items():
            assert ask(served, linked, policy)[0] == text
        assert ask(served, linked, "naive")[1]["cached_tokens"] == cached
        served.wait_until_idle()
        files[0].unlink()
        files[1].write_bytes(b"nonsense")
        text, details = ask(served, linked, "naive")
        assert (text, details["cached_tokens"]) == (answers["naive"], 0)
        served.llm.store.flush()
        assert ask(served, linked, "naive")[1]["cached_tokens"] == cached
