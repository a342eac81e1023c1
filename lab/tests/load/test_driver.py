"""Requests over HTTP: what is timed, from when on, and what becomes of those that fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from lab.tests.load.conftest import Body, Serve, chunk, streamed, usage_event, words
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvlinker_lab.load.driver import (
    ClosedLoop,
    Load,
    LoadRun,
    OpenLoop,
    PromptUsage,
    drive,
)
from kvlinker_lab.load.endpoint import Endpoint, ServerFailedError
from kvlinker_lab.load.prompts import PlainDocuments
from kvlinker_lab.load.traffic import Conversation, Turn

FORM = PlainDocuments(("A document.",))


def asking(*questions: str) -> list[Conversation]:
    """A conversation of one turn for each question."""
    return [Conversation((Turn((0,), question, 4),)) for question in questions]


def sent(
    endpoint: Endpoint,
    conversations: Sequence[Conversation],
    load: Load | None = None,
    *,
    patience: float = 30,
) -> LoadRun:
    return drive(endpoint, conversations, load or ClosedLoop(1), FORM, patience=patience)


def test_times_are_those_of_the_text(serve: Serve) -> None:
    endpoint = serve(
        lambda _: words(
            0.1, "one", 0.05, "two", 0.05, "three", cached_tokens=6, recomputed_tokens=2
        )
    )
    (result,) = sent(endpoint, asking("?")).results
    assert result.failure is None
    assert result.text == "onetwothree"
    assert result.first_token is not None
    assert result.last_token is not None
    assert 0.1 <= result.first_token < result.last_token <= result.ended
    assert result.last_token >= 0.2
    assert result.seconds_per_token == pytest.approx((result.last_token - result.first_token) / 2)
    assert result.output_tokens == 3
    assert result.usage == PromptUsage(10, 6, 2)


def test_a_stream_without_usage_has_its_texts_counted(serve: Serve) -> None:
    endpoint = serve(lambda _: streamed(chunk("a"), chunk("b"), chunk(finish="stop")))
    (result,) = sent(endpoint, asking("?")).results
    assert (result.failure, result.output_tokens, result.usage) == (None, 2, None)


def test_what_llama_cpps_server_reused_is_read_from_its_timings(serve: Serve) -> None:
    end = {"choices": [], "timings": {"cache_n": 8, "prompt_n": 3, "prompt_ms": 1.5}}

    def answered(said: list[str], _: Body) -> Response:
        return streamed(chunk("a"), chunk(finish="stop"), *said)

    silent = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 1}}
    for events in ((end,), (silent, end)):
        said = [f"data: {json.dumps(event)}\n\n" for event in events]
        endpoint = serve(partial(answered, said))
        (result,) = sent(endpoint, asking("?")).results
        assert result.usage == PromptUsage(11, 8, None)


def test_failures_are_told_by_kind(serve: Serve) -> None:
    answers = {
        "busy": lambda: JSONResponse({"error": {"message": "Come back later."}}, 429),
        "down": lambda: PlainTextResponse("oh", 500),
        "torn": lambda: streamed(chunk("a")),
        "failing": lambda: streamed(chunk("a"), 'data: {"error": {"message": "It broke."}}\n\n'),
        "garbled": lambda: streamed("data: {\n\n"),
        "no stream": lambda: JSONResponse({"choices": []}),
        "silent": lambda: streamed(chunk(finish="stop"), usage_event(3)),
    }

    def answer(body: Body) -> Response:
        question = body["messages"][0]["content"].removeprefix("A document.")
        return answers[question]()

    run = sent(serve(answer), asking(*answers))
    told = {
        name: (result.failure, result.detail)
        for name, result in zip(answers, run.results, strict=True)
    }
    assert told["busy"] == ("status 429", "Come back later.")
    assert told["down"] == ("status 500", "oh")
    assert told["torn"][0] == "broken off"
    assert told["failing"] == ("error", "It broke.")
    assert told["garbled"][0] == told["no stream"][0] == "unreadable"
    assert told["silent"][0] == "no text"


def test_what_was_seen_of_an_answer_that_is_not_finished_in_time_is_kept(serve: Serve) -> None:
    (result,) = sent(serve(lambda _: words("a", 60.0, "b")), asking("?"), patience=2.0).results
    assert (result.failure, result.detail) == ("unfinished", "no complete answer within 2 s")
    assert result.first_token is not None
    assert result.text == "a"


def test_nobody_there(serve: Serve) -> None:
    endpoint = replace(serve(lambda _: words("a")), url="http://127.0.0.1:9")
    (result,) = sent(endpoint, asking("?")).results
    assert result.failure == "connection"
    with pytest.raises(
        ServerFailedError,
        match=r"No OpenAI-compatible server answers at http://127\.0\.0\.1:9/v1/models",
    ):
        Endpoint.find("http://127.0.0.1:9/v1")


def test_the_open_loop_does_not_wait_for_a_server_that_falls_behind(serve: Serve) -> None:
    """The server answers one request after another; those that wait are not spared their time."""
    one_at_a_time = threading.Lock()

    def answer(_: Body) -> Response:
        with one_at_a_time:  # which holds the server's event loop up, too
            threading.Event().wait(0.1)
        return words("a", "b")

    run = sent(serve(answer), asking(*"abcdefgh"), OpenLoop(1000.0))
    firsts = sorted(result.first_token or 0 for result in run.results)
    assert len(firsts) == 8
    for place, first in enumerate(firsts, start=1):
        assert first >= 0.1 * place - 0.05  # from when it was due, not from when the server took it
    assert run.seconds >= 0.8


def test_what_is_not_finished_in_time_counts(serve: Serve) -> None:
    run = sent(serve(lambda _: words(20.0, "never")), asking(*"abc"), OpenLoop(100.0), patience=0.3)
    assert [result.failure for result in run.results] == ["unfinished"] * 3
    assert run.seconds < 20


@pytest.mark.parametrize("users", [1, 3])
def test_the_closed_loop_has_as_many_requests_as_users(serve: Serve, users: int) -> None:
    running, most, lock = 0, 0, threading.Lock()

    def answer(_: Body) -> Response:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        response = words("a")
        inner = response.body_iterator  # type: ignore[attr-defined]

        async def counted():
            nonlocal running
            while most < users:
                await asyncio.sleep(0.01)
            async for part in inner:
                yield part
                if "[DONE]" in part:
                    with lock:
                        running -= 1

        response.body_iterator = counted()  # type: ignore[attr-defined]
        return response

    run = sent(serve(answer), asking(*"abcdefg"), ClosedLoop(users))
    assert [result.failure for result in run.results] == [None] * 7
    assert most == users


def test_turns_follow_on_answers(serve: Serve) -> None:
    bodies: list[Body] = []

    def answer(body: Body) -> Response:
        bodies.append(body)
        return words(f"answer {len(bodies)}")

    thinking = 0.5
    turns = (
        Turn((0,), "first", 1),
        Turn((), "second", 1, think_seconds=thinking),
        Turn((), "third", 1),
    )
    run = sent(serve(answer), [Conversation(turns)])
    assert [message["content"] for message in bodies[-1]["messages"]] == [
        *("A document.first", "answer 1", "second", "answer 2", "third")
    ]
    assert sum(result.ended for result in run.results) + thinking <= run.seconds + 0.01, (
        "thinking is not waiting"
    )


def test_turns_behind_a_failure_are_not_forgotten(serve: Serve) -> None:
    turns = tuple(Turn((), question, 1) for question in "abc")
    run = sent(
        serve(lambda _: JSONResponse({"error": {"message": "No."}}, 400)), [Conversation(turns)]
    )
    assert [result.failure for result in run.results] == ["status 400", "not sent", "not sent"]


def test_how_long_tokens_are_is_learnt_from_the_server(serve: Serve) -> None:
    def answer(body: Body) -> Response:
        tokens = 7 + len(body["messages"][0]["content"]) // 4
        return JSONResponse({"usage": {"prompt_tokens": tokens}})

    endpoint = serve(answer)
    assert endpoint.model == "scripted"
    assert endpoint.characters_per_token() == pytest.approx(4)
    with pytest.raises(ServerFailedError, match="does not report the tokens"):
        serve(lambda _: JSONResponse({})).characters_per_token()
    with pytest.raises(
        ServerFailedError, match="counts 5 tokens in a long prompt, and 5 in a short one"
    ):
        serve(lambda _: JSONResponse({"usage": {"prompt_tokens": 5}})).characters_per_token()
