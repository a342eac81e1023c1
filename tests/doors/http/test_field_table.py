"""One table decides which fields are taken and refused, and the documentation shows it."""

from __future__ import annotations

import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import anthropic.types.beta
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import openai.types.embedding_create_params
import openai.types.responses.response_create_params
import pytest
from pydantic import ValidationError

from kvlinker.doors.http.answers.chat import ChatCompletionRequest
from kvlinker.doors.http.fields.bodies import ignored_paths
from kvlinker.doors.http.fields.foreign import (
    ELSEWHERE,
    FIELDS,
    ROUTES,
    ForeignFields,
    Place,
    foreign_fields,
)
from tests.doors.http.field_table import BODIES, with_table

API = Path(__file__).parents[3] / "docs" / "api.md"
LEAST: dict[Place, dict[str, Any]] = {
    Place.CHAT: {"messages": [{"role": "user", "content": "a"}]},
    Place.COMPLETIONS: {"prompt": "a"},
    Place.RESPONSES: {"input": "a"},
    Place.MESSAGES: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    Place.COUNT_TOKENS: {"messages": [{"role": "user", "content": "a"}]},
    Place.TOKENIZE: {"text": "a"},
    Place.DETOKENIZE: {"tokens": []},
    Place.EMBEDDINGS: {"input": "a"},
}
"""The least that each route takes."""

WRONG: Any = {"not": ["what", "it", "means"]}


def rows() -> Iterator[tuple[Place, str, ForeignFields]]:
    for place, body in BODIES.items():
        for name, fields in foreign_fields(place, body.model_fields).items():
            yield place, name, fields


def refusal(place: Place, name: str, value: Any) -> dict[str, Any] | None:
    """The complaint about a value of a field, if there is one."""
    try:
        BODIES[place].model_validate({**LEAST[place], name: value})
    except ValidationError as error:
        (complaint,) = error.errors()
        assert complaint["loc"] == (name,)
        return dict(complaint)
    return None


def test_the_documentation_has_the_table() -> None:
    page = API.read_text()
    assert page == with_table(page), "run python -m tests.doors.http.field_table docs/api.md"


def test_a_page_without_marks_is_an_error() -> None:
    with pytest.raises(ValueError, match="fields"):
        with_table("# API\n")


def test_fields_are_taken_or_refused_as_the_table_says(subtests: pytest.Subtests) -> None:
    for place, name, fields in rows():
        with subtests.test(f"{place} {name}"):
            assert refusal(place, name, None) is None
            for no_op in fields.no_ops or ():
                assert refusal(place, name, no_op) is None
            wrong = refusal(place, name, WRONG)
            if fields.refused:
                assert wrong is not None
                assert (wrong["type"], wrong["ctx"]) == (
                    "unsupported_parameter",
                    {"why": fields.why},
                )
                continue
            assert wrong is None
            made = BODIES[place].model_validate({**LEAST[place], name: WRONG})
            named = [] if fields.no_ops is None else [name]
            assert list(ignored_paths(made)) == named


def test_what_is_left_out_is_named_from_outside_in_by_the_names_of_the_api() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "deep": 1}}
    body = ChatCompletionRequest.model_validate(
        {
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "user", "content": [{"type": "text", "text": "Hi", "odder": 1}]},
            ],
            "response_format": form,
            "outside": 1,
        }
    )
    first, *within = ignored_paths(body)
    assert first == "outside"
    assert sorted(within) == [
        "messages.1.content.0.odder",
        "response_format.json_schema.deep",
    ]


def test_no_field_is_in_the_table_twice_or_served_beside() -> None:
    for place in Place:
        own = set(BODIES[place].model_fields) if place in BODIES else set()
        names = [name for fields in FIELDS if place in fields.places for name in fields.names]
        assert sorted(names) == sorted(set(names) - own)
    elsewhere = [name for fields in ELSEWHERE for name in fields.names]
    assert len(elsewhere) == len(set(elsewhere))
    assert BODIES.keys() - {Place.DETOKENIZE, Place.EMBEDDINGS} <= ROUTES


PARAMETERS: list[tuple[Place, Any]] = [
    (
        Place.CHAT,
        openai.types.chat.completion_create_params.CompletionCreateParamsNonStreaming,
    ),
    (
        Place.COMPLETIONS,
        openai.types.completion_create_params.CompletionCreateParamsNonStreaming,
    ),
    (
        Place.RESPONSES,
        openai.types.responses.response_create_params.ResponseCreateParamsNonStreaming,
    ),
    (
        Place.MESSAGES,
        anthropic.types.message_create_params.MessageCreateParamsNonStreaming,
    ),
    (
        Place.MESSAGES,
        anthropic.types.beta.message_create_params.MessageCreateParamsNonStreaming,
    ),
    (Place.EMBEDDINGS, openai.types.embedding_create_params.EmbeddingCreateParams),
    (Place.COUNT_TOKENS, anthropic.types.MessageCountTokensParams),
    (Place.COUNT_TOKENS, anthropic.types.beta.MessageCountTokensParams),
]


def test_all_fields_of_the_clients_are_known(subtests: pytest.Subtests) -> None:
    for place, parameters in PARAMETERS:
        with subtests.test(f"{place} {parameters.__module__}"):
            body = BODIES[place]
            known = {*body.model_fields, *foreign_fields(place, body.model_fields)}
            assert typing.get_type_hints(parameters).keys() - known == set()
