"""Hooks for schemathesis: short answers, and which requests a server may refuse although the
document allows them."""

from __future__ import annotations

import re
from typing import Any

import schemathesis

MOST_TOKENS = 4
LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
"""The fields that limit answers, by path: what has none may fill the context window, up to 128
times."""

BEYOND_SCHEMAS = {
    "Input should be a valid integer": "1.0 is an integer in JSON schemas.",
    "names no context cache|is the id of no call": "A schema does not know what there is.",
    "'metadata' is a list of": "A schema cannot compare the lengths of lists.",
    "has no word to search for": "What is a word is known by the index.",
    "Unknown policy": "Names of policies have parameters.",
    "is in the past": "A schema does not know what time it is.",
    "which is not among the 'tools'": "A schema cannot compare names in two fields.",
    "No token is left to choose": "What is left to come is known by the model and its tokenizer.",
    "of the same name": "Entries of a list are told apart by one of their fields.",
    "the context window takes": "Only the tokenizer can count tokens.",
    "Token ids are integers from|is not in the model's vocabulary": "Ids are the model's.",
    "both ask for a form|begins another: give one of them": (
        "Programs that generate requests give up at documents with a rule for each pair of fields."
    ),
    "cannot be enforced": "What a grammar can express is known by its compiler.",
    "There is no text to cache": "What is text in a file is known by who reads it.",
    "need a converter that is not installed": "What is installed is known by the server.",
    "Input should be a JSON object, as text": "A text may be JSON or not.",
    "a message of role": (
        "Where tools and documents are shown depends on the model's chat template."
    ),
}
"""By pattern of the error, why no JSON schema can say it."""


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    """Ask for few tokens where the request would be answered with many."""
    field = LIMITS.get(case.operation.path)
    if field is None or not isinstance(case.body, dict):
        return
    for name in (field, "max_completion_tokens", "min_tokens"):
        limit = case.body.get(name)
        if (limit is None and name == field) or (
            type(limit) is int and MOST_TOKENS < limit < 2**31
        ):
            case.body[name] = MOST_TOKENS


@schemathesis.check
def accepts_what_the_document_allows(
    ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case
) -> None:
    """Refuse a 400 to a valid request, unless a schema could not have said why."""
    mode = case.meta.generation.mode if case.meta else None
    if response.status_code == 400 and mode is schemathesis.GenerationMode.POSITIVE:
        assert any(re.search(pattern, response.text) for pattern in BEYOND_SCHEMAS), response.text
