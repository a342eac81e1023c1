"""Requests that go on from kept answers of /v1/responses, by OpenAI's client; reading, deleting and
sweeping them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from kvlinker.base.errors import CatalogUnavailableError
from kvlinker.llm import LLM
from kvlinker.store.catalog.responses import ResponseLog
from tests.doors.http.fake_engine import FakeEngine
from tests.doors.http.serving import MODEL_NAME, Served, serving, tiny_model, tiny_settings
from tests.doors.http.test_disconnect import asked
from tests.doors.http.test_messages import A_CALL

PATH = "/v1/responses"
TOOLS: Any = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]
RESULT: Any = {"type": "function_call_output", "output": "Sunny."}


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def speaking(faked: Served) -> Iterator[openai.OpenAI]:
    """A client of a server whose engine says what it is told to."""
    with openai.OpenAI(base_url=f"{faked.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, said: Any, **options: Any) -> Any:
    fields: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_output_tokens": 6}
    return client.responses.create(input=said, **(fields | options))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def prompts(engine: FakeEngine, served: Served) -> list[str]:
    """The prompts of the engine's requests."""
    return [served.llm.text_of(request.prompt) for request in engine.requests]


def test_a_conversation_goes_on_from_its_last_answer(client: openai.OpenAI) -> None:
    first = ask(client, "Hi", instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)
    again = ask(client, [user("And?")], previous_response_id=first.id)
    third = ask(client, "So?", previous_response_id=again.id)
    whole = [user("Hi"), *first.output, user("And?"), *again.output, user("So?")]
    same = ask(client, whole)
    assert (third.previous_response_id, third.instructions) == (again.id, None)
    assert third.usage.input_tokens == same.usage.input_tokens
    assert third.output_text == same.output_text
    count = client.responses.input_tokens.count(
        model=MODEL_NAME, input="So?", previous_response_id=again.id
    )
    assert (count.object, count.input_tokens) == (
        "response.input_tokens",
        third.usage.input_tokens,
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_loop_of_tools_sends_results_alone(
    speaking: openai.OpenAI, faked: Served, engine: FakeEngine, stream: bool
) -> None:
    engine.script = [f"Let me see.\n{A_CALL}"]
    if stream:
        events = list(ask(speaking, "Weather?", tools=TOOLS, stream=True))
        assert [e.response.store for e in (events[0], events[-1])] == [True, True]
        first = events[-1].response
    else:
        first = ask(speaking, "Weather?", tools=TOOLS)
    *_, call = first.output
    engine.script = ["Nice."]
    result = RESULT | {"call_id": call.call_id}
    ask(speaking, [result], tools=TOOLS, previous_response_id=first.id)
    references = [{"type": "item_reference", "id": item.id} for item in first.output]
    ask(speaking, [user("Weather?"), *references, result], tools=TOOLS)
    ask(speaking, [user("Weather?"), *first.output, result], tools=TOOLS)
    _, by_id, by_references, in_full = prompts(engine, faked)
    assert by_id == by_references == in_full
    assert "Let me see." in by_id


def test_items_of_earlier_input_are_referred_to(
    speaking: openai.OpenAI, faked: Served, engine: FakeEngine
) -> None:
    engine.script = [f"Let me see.\n{A_CALL}"]
    first = ask(speaking, "Weather?", tools=TOOLS, extra_body={"request_id": "one_1"})
    result = RESULT | {"call_id": first.output[-1].call_id}
    engine.script = ["Nice."]
    again = ask(speaking, [result, user("Sure?")], tools=TOOLS, previous_response_id=first.id)
    listed = speaking.responses.input_items.list(again.id, order="asc").data
    references = [{"type": "item_reference", "id": item.id} for item in [*listed, *again.output]]
    third = ask(speaking, [*references, user("So?")], tools=TOOLS)
    asked = [user("Weather?"), *first.output, result, user("Sure?"), *again.output, user("So?")]
    ask(speaking, asked, tools=TOOLS)
    *_, by_references, in_full = prompts(engine, faked)
    assert by_references == in_full
    kept = speaking.responses.input_items.list(third.id, order="asc").data
    assert [item.id for item in kept[:-1]] == [each["id"] for each in references]
    speaking.responses.delete(first.id)
    for gone in (listed[0].id, f"msg_{again.id}_99"):
        with pytest.raises(openai.NotFoundError) as unknown:
            ask(speaking, [{"type": "item_reference", "id": gone}])
        assert unknown.value.code == "item_not_found"


def test_kept_answers_survive_the_server(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        first = served.post(PATH, {"input": "Hi", "max_output_tokens": 3}).json()
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        assert served.get(f"{PATH}/{first['id']}").json() == first
        more = {"input": "And?", "max_output_tokens": 1, "previous_response_id": first["id"]}
        again = served.post(PATH, more).json()
        assert again["usage"]["input_tokens"] > first["usage"]["input_tokens"]


def test_an_answer_is_read_as_it_was_given(client: openai.OpenAI) -> None:
    first = ask(client, "Hi", metadata={"a": "b"}, instructions="Be brief.")
    assert client.responses.retrieve(first.id) == first
    parts: Any = [{"type": "input_text", "text": "And?"}]
    again = ask(
        client, [{"role": "user", "content": parts}], previous_response_id=first.id, stream=True
    )
    *_, last = again
    assert client.responses.retrieve(last.response.id) == last.response
    items: list[Any] = list(
        client.responses.input_items.list(last.response.id, order="asc", limit=2)
    )
    assert [item.content[0].text for item in items] == ["Hi", first.output_text, "And?"]
    assert items[1] == first.output[0]
    newest = client.responses.input_items.list(last.response.id, limit=1)
    assert (newest.data[0], newest.has_more) == (items[2], True)


def test_what_was_deleted_is_gone(client: openai.OpenAI, served: Served) -> None:
    first = ask(client, "Hi")
    again = ask(client, "And?", previous_response_id=first.id)
    told = served.http.delete(f"{PATH}/{first.id}").json()
    assert told == {"id": first.id, "object": "response", "deleted": True}
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError) as missing:
            call(first.id)
        assert missing.value.code == "response_not_found"
    for previous in (first.id, again.id, "resp_none"):
        with pytest.raises(openai.BadRequestError, match="Send the whole conversation") as refused:
            ask(client, "So?", previous_response_id=previous)
        assert refused.value.code == "previous_response_not_found"
        assert refused.value.param == "previous_response_id"
    with pytest.raises(openai.NotFoundError, match="Send the item itself") as unknown:
        ask(client, [user("Hi"), {"type": "item_reference", "id": first.output[0].id}])
    assert (unknown.value.code, unknown.value.param) == ("item_not_found", "input.1.id")


def test_wrong_ways_to_read_are_refused(client: openai.OpenAI, served: Served) -> None:
    kept = ask(client, "Hi")
    for query, param in (("?stream=true", "stream"), ("/input_items?after=msg_0", "after")):
        answer = served.get(f"{PATH}/{kept.id}{query}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert served.get(f"{PATH}/resp_none/input_items").status_code == 404


def test_what_is_not_to_be_kept_is_not(client: openai.OpenAI, tmp_path: Path) -> None:
    answer = ask(client, "Hi", store=False)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(answer.id)
    settings = tiny_settings(tmp_path, response_ttl=0)
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        told = served.post(PATH, {"input": "Hi", "max_output_tokens": 1, "store": True}).json()
        assert told["store"] is False
        assert served.get(f"{PATH}/{told['id']}").status_code == 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_client_left_is_not_kept(
    faked: Served, engine: FakeEngine, stream: bool
) -> None:
    engine.flowing.clear()
    with asked(faked, path=PATH, fields={"input": "Hi"}, stream=stream) as connection:
        engine.wait_until_running(1)
        assert not stream or connection.recv(9) == b"HTTP/1.1 "
    engine.wait_until_idle()
    assert engine.cancelled == 1
    engine.flowing.set()
    engine.script = ["Hi."]
    after = faked.post(PATH, {"input": "Hi"}).json()
    assert rows(faked) == [(after["id"],)]


def test_a_failed_answer_is_not_kept(speaking: openai.OpenAI, engine: FakeEngine) -> None:
    engine.fails_at = 1
    *_, last = ask(speaking, "Hi", stream=True)
    assert last.type == "response.failed"
    with pytest.raises(openai.NotFoundError):
        speaking.responses.retrieve(last.response.id)


def test_answers_are_given_though_they_cannot_be_kept(
    speaking: openai.OpenAI,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def unavailable(*_: Any, **__: Any) -> None:
        raise CatalogUnavailableError("no answer")

    monkeypatch.setattr(ResponseLog, "add", unavailable)
    engine.script = ["Hi."]
    answer = ask(speaking, "Hi")
    assert (answer.store, answer.output_text) == (False, "Hi.")
    assert "An answer was not kept" in caplog.text


def test_other_tenants_know_nothing_of_it(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path, api_keys=("anna", "bert"))
    anna, bert = ({"authorization": f"Bearer {key}"} for key in ("anna", "bert"))
    with serving(LLM.from_model(tiny_model(), settings), settings) as served:
        least = {"input": "Hi", "max_output_tokens": 1}
        first = served.post(PATH, least, headers=anna).json()
        place = f"{PATH}/{first['id']}"
        unknown = served.get(f"{PATH}/resp_none", headers=bert).json()["error"]
        for method, path in (("GET", place), ("DELETE", place), ("GET", f"{place}/input_items")):
            answer = served.http.request(method, path, headers=bert)
            assert answer.status_code == 404
            message = answer.json()["error"]["message"].replace(first["id"], "resp_none")
            assert message == unknown["message"]
        more = least | {"previous_response_id": first["id"]}
        assert served.post(PATH, more, headers=bert).status_code == 400
        (asked,) = served.get(f"{place}/input_items", headers=anna).json()["data"]
        for each in (first["output"][0], asked):
            more_of = least | {"input": [{"type": "item_reference", "id": each["id"]}]}
            assert served.post(PATH, more_of, headers=bert).status_code == 404
            assert served.post(PATH, more_of, headers=anna).status_code == 200
        assert served.post(PATH, more, headers=anna).status_code == 200


def test_old_answers_are_swept(client: openai.OpenAI, served: Served) -> None:
    kept = ask(client, "Hi")
    log = served.llm.catalog.responses
    day = 86_400 * 7
    assert log.get(kept.id, "default", time.time() + day - 60)
    assert log.get(kept.id, "default", time.time() + day + 60) is None
    with served.llm.catalog._database.transaction() as connection:
        connection.execute("UPDATE responses SET expires_at = 1 WHERE id = ?", (kept.id,))
    served.llm.caches.sweep()
    assert (kept.id,) not in rows(served)


def rows(served: Served) -> list[Any]:
    """The ids of all that is kept."""
    return list(served.llm.catalog._database.query("SELECT id FROM responses", {}))
