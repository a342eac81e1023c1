"""What other settings would have found cached: in an answer's usage, the log and /status, without
anything of another tenant's."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvlinker.doors.http.fields.server_status import RecentRequest
from kvlinker.doors.http.models import LEAST_REUSABLE, MOST_KEPT, RecentRequests
from kvlinker.llm import LLM
from tests.doors.http.serving import Served, serving, tiny_model, tiny_settings
from tests.service.implicit.test_seen_lines import document

CHAT = "/v1/chat/completions"
A, B, C = (document(name) for name in "abc")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the keys anna and bert, and root, an admin's, that finds marked texts alone."""
    settings = tiny_settings(
        tmp_path_factory.mktemp("state"),
        api_keys="anna,bert",
        admin_keys="root",
        prefix_cache="on",
    )
    with serving(LLM.from_model(tiny_model(), settings), settings) as running:
        yield running


def ask(served: Served, content: str, key: str = "anna", **fields: Any) -> dict[str, int]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
    answer = served.post(CHAT, body, headers={"Authorization": f"Bearer {key}"})
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    return cast(dict[str, int], {**usage, **usage["prompt_tokens_details"]})


def status(served: Served, key: str) -> dict[str, Any]:
    told = served.get("/status", headers={"Authorization": f"Bearer {key}"}).json()
    return cast(dict[str, Any], told)


def joined(*documents: str, question: str) -> str:
    return "\n\n".join([*documents, question])


def test_passages_in_another_order_could_have_been_cached(keyed: Served) -> None:
    before = status(keyed, "root")["reusable_tokens"]
    assert ask(keyed, joined(A, B, question="Who?"))["reusable_tokens"] == 0
    assert ask(keyed, joined(A, B, question="Why?"))["reusable_tokens"] == 0, "it begins alike"
    told = ask(keyed, joined(B, A, question="Where?"))
    share = told["reusable_tokens"] / told["prompt_tokens"]
    assert 0.8 < share < 1
    assert (
        told["cached_tokens"] + told["recomputed_tokens"] + told["reusable_tokens"]
        <= (told["prompt_tokens"])
    )
    assert ask(keyed, joined(C, A, question="Where?"), "bert")["reusable_tokens"] == 0, (
        "what another tenant has asked is nobody's business"
    )
    after = status(keyed, "root")
    assert after["reusable_tokens"] - before == told["reusable_tokens"]
    assert [entry["reusable"] for entry in after["recent"][:2]] == [0, told["reusable_tokens"]]
    assert [entry["reusable"] for entry in status(keyed, "bert")["recent"]] == [0]
    assert len(status(keyed, "anna")["recent"]) == len(after["recent"]) - 1


@pytest.mark.parametrize("link", [{"policy": "full"}, {"implicit": "auto"}])
def test_nothing_is_said_where_the_setting_would_change_nothing(
    keyed: Served, link: dict[str, str]
) -> None:
    first, second = (document(f"{name} {link}") for name in "de")
    ask(keyed, joined(first, second, question="Who?"), link=link)
    told = ask(keyed, joined(second, first, question="Where?"), link=link)
    assert told["reusable_tokens"] == 0


def test_streams_and_other_apis_tell_it_too(keyed: Served) -> None:
    first, second = (document(name) for name in ("f", "g"))
    headers = {"Authorization": "Bearer anna"}
    body = {"input": joined(first, second, question="Who?"), "max_output_tokens": 1}
    keyed.post("/v1/responses", body, headers=headers)
    body["input"] = joined(second, first, question="Who?")
    usage = keyed.post("/v1/responses", body, headers=headers).json()["usage"]
    assert usage["input_tokens_details"]["reusable_tokens"] > 0
    prompt = joined("Else.", first, question="Where?")
    stream = {"prompt": prompt, "max_tokens": 1, "stream": True}
    text = keyed.post(
        "/v1/completions", stream | {"stream_options": {"include_usage": True}}, headers=headers
    ).text
    assert '"reusable_tokens":0' not in text.replace(" ", "")


def answered(reusable: int = 0) -> RecentRequest:
    return RecentRequest(
        at=1,
        model="model",
        policy="naive",
        cached=0,
        recomputed=0,
        fresh=reusable + 10,
        reusable=reusable,
        uncomputed=0,
        output_tokens=1,
        ttft_ms=0.5,
    )


def test_the_log_says_it_once_with_the_setting_to_change(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvlinker.doors.http.models")
    recent = RecentRequests()
    recent.add("one", answered(LEAST_REUSABLE - 1))
    assert not caplog.records
    for _ in range(3):
        recent.add("two", answered(1))
    (line,) = caplog.messages
    assert "--implicit auto" in line
    assert f"{LEAST_REUSABLE} stood" in line
    assert recent.reusable == LEAST_REUSABLE + 2


def test_so_many_requests_are_remembered() -> None:
    recent = RecentRequests()
    recent.add("one", answered(1))
    for _ in range(MOST_KEPT - 1):
        recent.add("two", answered())
    assert [each.reusable for each in recent.of("one")] == [1]
    recent.add("two", answered())
    assert recent.of("one") == []
    assert recent.of(None) == recent.of("two")
