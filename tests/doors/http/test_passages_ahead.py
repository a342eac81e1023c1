"""With ``auto``, passages that were seen once are chunks by the next request, if the engine was
idle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvlinker.base.types.chunks import Chunk
from kvlinker.llm import LLM
from kvlinker.service.implicit import ahead
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.service.implicit.test_seen_lines import document
from tests.waiting import wait_until

ONE, TWO = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = tiny_settings(tmp_path, api_keys="one,two", implicit="auto", implicit_ahead="on")
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=ONE) as server:
        yield server


def ask(served: Served, *texts: str, **options: Any) -> Any:
    text = "\n\n".join([*texts, "Why?"])
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    answer = served.post("/v1/chat/completions", body, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def caches(served: Served, headers: dict[str, str] = ONE) -> list[dict[str, Any]]:
    data: list[dict[str, Any]] = served.get("/v1/context_caches", headers=headers).json()["data"]
    return data


def test_the_second_request_finds_chunks(served: Served) -> None:
    a, b = document("a"), document("b")
    assert ask(served, a, b)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    served.llm.settle()
    assert len(caches(served)) == 2
    assert {cache["tier"] for cache in caches(served)} == {"host"}
    second = ask(served, b, a)
    assert [cache["created"] for cache in second["link"]["context_caches"]] == [False, False]
    details = second["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] > 0.8 * second["usage"]["prompt_tokens"]
    assert caches(served, TWO) == []
    other = ask(served, b, a, headers=TWO)
    assert "link" not in other, "another tenant has seen nothing"


def test_what_stands_in_one_prompt_is_expected_together(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were known before, too, so that new ones have others to stand behind."""
    told: list[set[str]] = []

    def expect_together(chunks: Sequence[Chunk], *, tenant: str) -> None:
        told.append({chunk.content for chunk in chunks})

    monkeypatch.setattr(served.llm.engine, "expect_together", expect_together)
    a, b, c = (document(f"together-{name}") for name in "abc")
    ask(served, a, b)
    wait_until(lambda: len(told) == 1)
    ask(served, c, a)
    wait_until(lambda: len(told) == 2)
    assert (len(told[0]), len(told[1]), len(told[0] & told[1])) == (2, 2, 1)
    ask(served, a, c)
    passages = served.llm._reader._passages._ahead
    assert passages
    passages._waiting.join()
    assert len(told) == 2, "nothing was new"


def test_nothing_is_driven_out_for_it(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "MEMORY_SHARE", -1)
    ask(served, document("a"))
    passages = served.llm._reader._passages._ahead
    assert passages
    passages._waiting.join()
    monkeypatch.undo()
    ask(served, document("b"))
    wait_until(lambda: len(caches(served)) == 1)


def test_what_was_asked_for_stays_in_a_tenants_quota(tmp_path: Path) -> None:
    settings = tiny_settings(
        tmp_path, tenant_quota_caches=2, implicit="auto", implicit_ahead="on", implicit_caches=1000
    )
    with serving(LLM.from_model(tiny_model(), settings), settings) as server:
        marked = [
            {"type": "text", "text": document(name), "cache_control": {"type": "ephemeral"}}
            for name in "xy"
        ]
        body = {"messages": [{"role": "user", "content": marked}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200
        before = {cache["id"] for cache in caches(server)}
        assert len(before) == 2
        ask(server, document("a"), document("b"))
        passages = server.llm._reader._passages._ahead
        assert passages
        passages._waiting.join()
        assert {cache["id"] for cache in caches(server)} == before


def test_what_was_created_by_name_leaves_room_for_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, implicit="auto", implicit_ahead="on", implicit_caches=4)
    with serving(LLM.from_model(tiny_model(), settings), settings) as server:
        named = server.cache("One.", "Two.", "Three.", "Four.")
        ask(server, document("a"))
        wait_until(lambda: len(caches(server)) == len(named) + 1)
