"""A stream of the library yields an answer as it is generated, and its request ends with it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from kvlinker.base.errors import InvalidRequestError, StoreError
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.engines.contract.contract import Failed, RequestHandle
from kvlinker.service.answer import AnswerBuilder, AnswerStream, ChoiceSink
from tests.doors.http.serving import Served

HELLO: Any = [{"role": "user", "content": "Hello"}]
GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
LONG: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}


def test_pieces_are_the_answer(served: Served) -> None:
    (cache,) = served.llm.generate_context_cache(["The cat sat on the mat."])
    asked: Any = [{"role": "user", "content": [cache, "What is this?"]}]
    expected = served.llm.chat_completion(asked, policy="naive", **GREEDY)
    stream = served.llm.stream(asked, policy="naive", **GREEDY)
    pieces = list(stream)
    assert len(pieces) > 1
    assert {piece.kind for piece in pieces} == {"content"}
    assert "".join(piece.text for piece in pieces) == stream.answer.text == expected.text
    assert stream.answer.usage == expected.usage
    assert stream.answer.context_caches == expected.context_caches
    texts = list(served.llm.chat_completion(asked, policy="naive", stream=True, **GREEDY))
    assert texts == [piece.text for piece in pieces]


def test_the_whole_is_there_without_a_look_at_the_pieces(served: Served) -> None:
    expected = served.llm.chat_completion(HELLO, **GREEDY)
    assert served.llm.stream(HELLO, **GREEDY).answer.text == expected.text


def test_calls_stream_as_their_names_and_arguments(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    stream = served.llm.stream(HELLO, tools=[tool], tool_choice="required", max_tokens=200, seed=1)
    pieces = [piece for piece in stream if piece.kind != "content"]
    assert (pieces[0].kind, pieces[0].text) == ("call", "look")
    (call, *_) = stream.answer.tool_calls
    before_next = [piece.kind for piece in pieces[1:]]
    assert before_next[0] == "arguments"
    if stream.answer.finish_reason == "tool_calls":
        json.loads(call.arguments)
    with pytest.raises(InvalidRequestError, match="method 'stream'"):
        served.llm.chat_completion(HELLO, tools=[tool], stream=True)


def test_a_stream_that_is_left_ends_its_request(served: Served) -> None:
    with served.llm.stream(HELLO, **LONG) as stream:
        next(stream)
        assert served.llm.current_load().running == 1
    served.wait_until_idle()
    assert stream.answer.finish_reason == "cancelled"
    for _ in served.llm.stream(HELLO, **LONG):
        break
    served.wait_until_idle()
    dropped: AnswerStream | None = served.llm.stream(HELLO, **LONG)
    assert dropped is not None
    dropped = None
    served.wait_until_idle()


def test_who_asks_again_after_a_failure_learns_it_again() -> None:
    def submit(sink: ChoiceSink) -> RequestHandle:
        sink(0, Failed(StoreError("The disk is full.")))
        return RequestHandle(lambda: None)

    stream = AnswerStream(submit, AnswerBuilder())
    for _ in range(2):
        with pytest.raises(StoreError):
            next(stream)
    with pytest.raises(StoreError):  # and nobody waits for what does not come
        print(stream.answer)


def test_mistakes_are_errors_at_once(served: Served) -> None:
    with pytest.raises(InvalidRequestError):
        served.llm.stream(HELLO, temperature=-1)
    wrong: Any = {"temprature": 1}
    with pytest.raises(TypeError, match="Did you mean 'temperature'"):
        served.llm.stream(HELLO, **wrong)


def test_an_answer_is_explained(served: Served) -> None:
    (cache,) = served.llm.generate_context_cache(["The cat sat on the mat."])
    asked: Any = [{"role": "user", "content": [cache, "What is this?"]}]
    assert served.llm.chat_completion(asked, **GREEDY).explanation is None
    answer = served.llm.chat_completion(asked, policy="naive", explain=True, **GREEDY)
    assert answer.explanation is not None
    assert "The cat sat on the mat." in "".join(answer.explanation.texts or ())
    shown = answer._repr_html_()
    assert shown.count('title="cached"') > 1
    states = answer.explanation.states
    assert sum(state == "cached" for state in states) == answer.usage.cached_tokens
    assert any(one != other for one, other in pairwise(states))


def test_keyword_arguments_are_the_sampling_parameters() -> None:
    assert list(SamplingFields.__annotations__) == list(SamplingParams.__dataclass_fields__)
