"""With ``structure``, what agents repeat is read wherever it stands, and what can be read exactly
is read exactly; over HTTP on the real engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvlinker.llm import LLM
from tests.agent_bodies import RULES, TOOLS, system, tool
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings

ONE, TWO = ({"Authorization": f"Bearer {name}"} for name in ("one", "two"))
NAMES = ("read_file", "run_tests")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    settings = tiny_settings(
        tmp_path_factory.mktemp("state"),
        api_keys="one,two",
        implicit="structure",
        implicit_ahead="on",
        prefix_cache="on",
        policy="naive",
    )
    with serving(LLM.from_model(tiny_model(), settings), settings, headers=ONE) as server:
        yield server


def ask(
    served: Served,
    directory: str,
    *,
    tools: tuple[str, ...] = NAMES,
    headers: dict[str, str] = ONE,
    **fields: Any,
) -> Any:
    """Ask as an agent does, and wait until all is computed ahead."""
    rules = {name: RULES[name] for name in ("Role", "Tone")}
    body = {
        "messages": [
            {"role": "system", "content": system(directory, "2026-03-02", "clean", rules)},
            {"role": "user", "content": "Which of the tests fail?"},
        ],
        "tools": [tool(name, TOOLS[name]) for name in tools],
        "max_tokens": 2,
        "temperature": 0,
        "ignore_eos": True,
        **fields,
    }
    answer = served.post("/v1/chat/completions", body, headers=headers)
    assert answer.status_code == 200, answer.text
    passages = served.llm._reader._passages._ahead
    assert passages
    passages._waiting.join()
    return answer.json()


def read(answer: Any) -> tuple[float, float]:
    """The shares of the prompt's tokens that were read, and that were read exactly."""
    usage = answer["usage"]
    details = usage["prompt_tokens_details"]
    total = usage["prompt_tokens"]
    return details["cached_tokens"] / total, details["exact_cached_tokens"] / total


def test_what_agents_repeat_is_read_in_another_repository(served: Served) -> None:
    first = ask(served, "/home/anna/shop")
    assert read(first) == (0, 0)
    assert "link" not in first
    elsewhere = ask(served, "/srv/build/7f3a/other", tools=NAMES[::-1])
    share, exact = read(elsewhere)
    assert share >= 0.85
    assert exact < 0.3
    assert not any(cache["created"] for cache in elsewhere["link"]["context_caches"])


@pytest.mark.parametrize("implicit", ["structure", "auto"])
def test_what_can_be_read_exactly_is_read_exactly(served: Served, implicit: str) -> None:
    """Chunks that were computed since do not cut a prompt elsewhere."""
    directory = f"/home/anna/{implicit}"
    plain = ask(served, directory, link={"implicit": "off"})
    told = [ask(served, directory, link={"implicit": implicit}) for _ in range(2)]
    for answer in told:
        usage = answer["usage"]
        assert usage["prompt_tokens"] == plain["usage"]["prompt_tokens"]
        details = usage["prompt_tokens_details"]
        assert details["exact_cached_tokens"] == usage["prompt_tokens"] - 1
        assert answer["choices"] == plain["choices"]
    assert "link" in told[1]


def test_tenants_read_nothing_of_one_another(served: Served) -> None:
    ask(served, "/home/anna/shop")
    theirs = ask(served, "/home/bert/shop", headers=TWO)
    assert read(theirs) == (0, 0)
    assert "link" not in theirs
    assert read(ask(served, "/home/bert/bank", headers=TWO))[0] >= 0.85


def test_salts_read_nothing_of_one_another(served: Served) -> None:
    ask(served, "/home/anna/shop", cache_salt="one")
    assert read(ask(served, "/home/anna/bank", cache_salt="two")) == (0, 0)
    assert read(ask(served, "/home/anna/bank", cache_salt="one"))[0] >= 0.85
