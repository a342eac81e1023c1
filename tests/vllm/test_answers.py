"""Tools, forms and fields of decoding on vLLM: what the embedded engine's server promises, by the same tests."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytest.importorskip("vllm")

from tests.schemas import UNENFORCEABLE
from tests.server import test_tools
from tests.server.serving import Served
from tests.server.test_decoding import (  # noqa: F401
    test_an_echo_stands_before_the_answer,
    test_bad_words_do_not_come,
    test_logit_bias_forces_and_forbids,
    test_min_tokens_and_stop_tokens,
)
from tests.server.test_structured import (  # noqa: F401
    client,
    test_answers_with_and_without_a_form_share_steps,
    test_deep_schemas_are_refused,
    test_forms_and_context_caches_go_together,
    test_json_objects,
    test_schemas,
    test_streams_are_of_the_form_too,
    test_structured_outputs,
)
from tests.server.test_tools import (  # noqa: F401
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

CHAT = "/v1/chat/completions"
MARKED: Any = {"type": "text", "text": "The cat sat on the mat. " * 6, "cache_control": {"type": "ephemeral"}}


def test_required_calls_are_valid(served: Served, client: openai.OpenAI) -> None:
    test_tools.test_required_calls_are_valid(served, client, 1)


@pytest.mark.parametrize("name", list(UNENFORCEABLE)[:3])
def test_what_cannot_be_enforced_is_refused_before_the_answer(served: Served, name: str) -> None:
    schema, cause = UNENFORCEABLE[name]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = served.post(CHAT, {"messages": QUESTION, "response_format": form, "stream": True})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "response_format.json_schema.schema")
    assert cause in error["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_marks_documents_and_recognition_go_with_calls(served: Served, stream: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": [MARKED, {"type": "text", "text": "Where is it?"}]}],
        "documents": [{"text": "A dog and a small text. " * 6}],
        "link": {"policy": "legolink-4", "implicit": "auto"},
        "tools": [WEATHER, TIME],
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
    assert len(answer["link"]["context_caches"]) == 2
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 200


def test_an_answer_whose_tokens_are_all_forbidden_ends_alone(served: Served) -> None:
    """A form that nothing is left of harms nobody else."""
    body = {"messages": QUESTION, "structured_outputs": {"regex": "aaab"}, "bad_words": ["a", "aa", "aaa"]}
    served.post(CHAT, body | {"max_tokens": 8, "temperature": 0})
    assert served.post(CHAT, {"messages": QUESTION, "max_tokens": 2}).status_code == 200


def test_the_end_of_the_form_is_the_end_of_the_answer(served: Served) -> None:
    body = {"messages": QUESTION, "structured_outputs": {"choice": ["abc"]}, "ignore_eos": True, "min_tokens": 9}
    choice = served.post(CHAT, body | {"max_tokens": 20}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")
