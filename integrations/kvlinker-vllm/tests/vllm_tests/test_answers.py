"""Tools, forms and fields of decoding on vLLM: what the embedded engine's server promises, by the
same tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("vllm")

from tests.doors.http import test_tools
from tests.doors.http.field_table import BODIES
from tests.doors.http.serving import Served, listening
from tests.doors.http.test_decoding import (  # noqa: F401
    test_an_echo_stands_before_the_answer,
    test_bad_words_do_not_come,
    test_logit_bias_forces_and_forbids,
    test_min_tokens_and_stop_tokens,
)
from tests.doors.http.test_reasoning import (  # noqa: F401
    test_limits_of_reasoning_are_kept,
    test_reasoning_is_left_out_where_it_is_not_wanted,
    test_reasoning_is_turned_off_in_the_prompt,
    thinking,
)
from tests.doors.http.test_served_fields import *  # noqa: F403
from tests.doors.http.test_structured import (  # noqa: F401
    client,
    test_answers_with_and_without_a_form_share_steps,
    test_deep_schemas_are_refused,
    test_forms_and_context_caches_go_together,
    test_schemas,
    test_streams_are_of_the_form_too,
    test_structured_outputs,
)
from tests.doors.http.test_tools import (  # noqa: F401
    QUESTION,
    TIME,
    WEATHER,
    test_a_conversation_with_calls_and_results_goes_on,
    test_a_named_function_is_called_once,
    test_calls_are_told_in_streams,
    test_results_may_be_context_caches,
    test_strict_functions_are_called_with_valid_arguments_alone,
    test_the_clients_own_loop,
)
from tests.schemas import SCHEMAS, UNENFORCEABLE, check
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensRequest,
    AnthropicMessagesRequest,
)
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.exceptions import VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from kvlinker.doors.http.app import create_app
from kvlinker.doors.http.fields.foreign import Place, foreign_fields
from kvlinker.service.answer import Answer
from kvlinker.settings import Settings
from kvlinker_vllm.server.other_routes import add_other_routes

CHAT = "/v1/chat/completions"
MARKED: Any = {
    "type": "text",
    "text": "The cat sat on the mat. " * 6,
    "cache_control": {"type": "ephemeral"},
}


@pytest.fixture  # type: ignore[no-redef]
def reusing(served: Served) -> Served:
    """vLLM's prefix cache is on."""
    return served


def test_required_calls_are_valid(served: Served, client: openai.OpenAI) -> None:  # noqa: F811
    test_tools.test_required_calls_are_valid(served, client, 1)


@pytest.mark.parametrize("name", list(UNENFORCEABLE)[:3])
def test_what_cannot_be_enforced_is_refused_before_the_answer(served: Served, name: str) -> None:
    schema, cause = UNENFORCEABLE[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.post(CHAT, {"messages": QUESTION, "response_format": form, "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert cause in error["message"]


def test_answers_are_valid_under_every_schema(served: Served) -> None:
    """Random weights at temperature 1 say anything else; what did not come to its end is not valid
    yet."""
    weights = {token: 4.0 for mark in '"}],0123456789' for token in served.llm.token_ids(mark)}
    names = list(SCHEMAS)

    def answer(number: int) -> Answer:
        form = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": SCHEMAS[names[number]]},
        }
        options: dict[str, Any] = {
            "temperature": 1,
            "seed": number,
            "max_tokens": 300,
            "logit_bias": weights,
        }
        return served.llm.chat_completion(QUESTION, response_format=form, **options)

    with ThreadPoolExecutor(16) as pool:
        told = zip(names, pool.map(answer, range(len(names))), strict=True)
        ended = [(name, each.text) for name, each in told if each.finish_reason == "stop"]
    assert len(ended) > len(names) / 2
    for name, text in ended:
        check(SCHEMAS[name], json.loads(text))


@pytest.mark.parametrize("stream", [True, False])
def test_marks_documents_and_recognition_go_with_calls(served: Served, stream: bool) -> None:
    body = {
        "messages": [
            {"role": "user", "content": [MARKED, {"type": "text", "text": "Where is it?"}]}
        ],
        "documents": [{"text": "A dog and a small text. " * 6}],
        "link": {"policy": "legolink-4", "implicit": "auto"},
        "tools": [WEATHER | {"cache_control": {"type": "ephemeral"}}, TIME],
        "tool_choice": {"type": "function", "function": {"name": "get_time"}},
        "max_tokens": 200,
        "seed": 1,
        "logit_bias": {str(token): 4 for mark in '"}],' for token in served.llm.token_ids(mark)},
    }
    told = served.post(CHAT, body | {"stream": stream})
    assert told.status_code == 200, told.text
    if stream:
        assert '"get_time"' in told.text
        return
    answer = told.json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_time"
    assert len(answer["link"]["context_caches"]) == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_answer_whose_tokens_are_all_forbidden_ends_alone(served: Served) -> None:
    """A form that nothing is left of harms nobody else."""
    body = {
        "messages": QUESTION,
        "structured_outputs": {"regex": "aaab"},
        "bad_words": ["a", "aa", "aaa"],
    }
    served.post(CHAT, body | {"max_tokens": 8, "temperature": 0})
    assert served.post(CHAT, {"messages": QUESTION, "max_tokens": 2}).status_code == 200


def test_the_end_of_the_form_is_the_end_of_the_answer(served: Served) -> None:
    body = {
        "messages": QUESTION,
        "structured_outputs": {"choice": ["abc"]},
        "ignore_eos": True,
        "min_tokens": 9,
    }
    choice = served.post(CHAT, body | {"max_tokens": 20}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")


def test_what_vllm_refuses_is_the_clients_mistake(served: Served) -> None:
    """Also where kvlinker had nothing against it."""
    engine: Any = served.llm.engine
    error = engine._error_of(VLLMValidationError("too much"))
    assert (error.status, error.message) == (400, "vLLM refuses this request: too much")


@pytest.fixture(scope="module")
def other(served: Served, vllm_settings: Settings) -> Iterator[httpx.Client]:
    """A server as the command line starts it, with vLLM's routes behind kvlinker's."""
    keys = {"api_keys": ("user",), "admin_keys": ("admin",)}
    settings = vllm_settings.model_copy(update=keys)
    app = create_app(served.llm, settings)
    add_other_routes(app, served.llm.engine, settings)
    with (
        listening(app, settings, closes=False) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        http.headers["Authorization"] = "Bearer admin"
        yield http


def test_vllms_other_routes_are_served(other: httpx.Client) -> None:
    assert other.get("/load").json()
    body = {"messages": QUESTION, "max_tokens": 3, "temperature": 0}
    assert other.post("/invocations", json=body).json()["usage"]["completion_tokens"] <= 3
    assert other.post("/invocations", json=body | {"stream": True}).text.endswith(
        "data: [DONE]\n\n"
    )
    own = other.get("/v1/models").json()["data"]
    assert [model["owned_by"] for model in own] == ["kvlinker"]
    missing = other.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_vllms_other_routes_are_for_admins(other: httpx.Client) -> None:
    refused = other.get("/load", headers={"Authorization": "Bearer user"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
    assert other.get("/load", headers={"Authorization": "Bearer nobody"}).status_code == 401


PAGE = (Path(__file__).parents[4] / "docs" / "vllm.md").read_text()


@pytest.mark.parametrize(
    ("place", "request_type"),
    [
        (Place.CHAT, ChatCompletionRequest),
        (Place.COMPLETIONS, CompletionRequest),
        (Place.RESPONSES, ResponsesRequest),
        (Place.MESSAGES, AnthropicMessagesRequest),
        (Place.COUNT_TOKENS, AnthropicCountTokensRequest),
        (Place.TOKENIZE, TokenizeCompletionRequest),
        (Place.TOKENIZE, TokenizeChatRequest),
        (Place.DETOKENIZE, DetokenizeRequest),
    ],
)
def test_every_field_of_vllms_is_known(place: Place, request_type: Any) -> None:
    body = BODIES[place]
    known = {*body.model_fields, *foreign_fields(place, body.model_fields)}
    assert request_type.model_fields.keys() - known == set()


def test_every_field_of_vllms_stands_on_the_page() -> None:
    fields = {*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields}
    assert not [name for name in sorted(fields) if f"`{name}`" not in PAGE]


def test_every_route_of_vllms_stands_on_the_page() -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    paths = {
        path
        for route in build_app(args, ("generate",), None).routes
        if (path := getattr(route, "path", ""))
    }
    assert not [path for path in sorted(paths) if f"`{path}`" not in PAGE]
