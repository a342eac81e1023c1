"""Prompts that are not conversations, in all forms that OpenAI's completions take, and parts."""

from __future__ import annotations

from typing import Annotated, Any, cast

from pydantic import BaseModel, Discriminator, Field, JsonValue, Tag, WithJsonSchema

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MAX_CHOICES, MOST_PARTS
from kvlinker.base.types.messages import CachedPart, CompletionPrompt, TokenIds
from kvlinker.doors.http.fields.bodies import Text, TokenId
from kvlinker.doors.http.fields.parts import Part, content_of

_Tokens = Annotated[list[TokenId], Field(min_length=1)]

_PromptText = Annotated[Text, WithJsonSchema({"type": "string", "minLength": 1})]
"""A text of a prompt; the prompt's maker refuses an empty one."""

ONE_PROMPT: dict[str, JsonValue] = {
    "properties": {
        "prompt": {
            "if": {"type": "array", "items": {"type": ["string", "array"]}},
            "then": {"maxItems": 1},
        }
    }
}
"""The rule of routes that take only one prompt."""


def prompt_kind(value: Any) -> str | None:
    """Return the tag of the form that a prompt, or another input of texts and tokens, has; None for
    none."""
    if isinstance(value, str):
        return "<text>"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    if isinstance(first, str):
        return "<texts>"
    if isinstance(first, list):
        return "<token lists>"
    return "<parts>" if isinstance(first, dict | BaseModel) else "<tokens>"


PromptBody = Annotated[
    Annotated[_PromptText, Tag("<text>")]
    | Annotated[list[_PromptText], Field(min_length=1, max_length=MAX_CHOICES), Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], Field(min_length=1, max_length=MAX_CHOICES), Tag("<token lists>")]
    | Annotated[list[Part], Field(min_length=1, max_length=MOST_PARTS), Tag("<parts>")],
    Discriminator(
        prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, token ids, a list of these, or a list of parts",
    ),
]


def prompts_of(body: PromptBody) -> list[CompletionPrompt[CachedPart]]:
    """Return the prompts as the library takes them: one, unless it is a list of texts or a list of
    lists of token ids."""
    if isinstance(body, str):
        return [(body,)]
    if has_several(body):
        return [
            (one,) if isinstance(one, str) else TokenIds(tuple(cast(list[int], one)))
            for one in body
        ]
    if isinstance(body[0], int):
        return [TokenIds(tuple(body))]
    return [content_of(cast(list[Part], body))]


def has_several(body: PromptBody) -> bool:
    """Return whether the body is a list of prompts, which may hold only one."""
    return isinstance(body, list) and isinstance(body[0], str | list)


def single_prompt(body: PromptBody) -> CompletionPrompt[CachedPart]:
    """Return the prompt of a body that takes only one. Raises InvalidRequestError for several."""
    if has_several(body) and len(body) > 1:
        raise InvalidRequestError("'prompt' must be one prompt here.", param="prompt")
    return prompts_of(body)[0]
