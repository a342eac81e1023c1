"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Discriminator, Field, Tag, model_validator

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import Text
from kvlinker.server.bodies.generation import MAX_CHOICES, GenerationBody
from kvlinker.server.bodies.parts import Part
from kvlinker.types.sampling import SamplingParams

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

_Tokens = Annotated[list[int], Field(min_length=1)]


def _prompt_kind(value: Any) -> str | None:
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


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Tag("<texts>")]
    | Annotated[_Tokens, Tag("<tokens>")]
    | Annotated[list[_Tokens], Tag("<token lists>")]
    | Annotated[list[Part], Tag("<parts>")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be text, token ids, a list of these, or a list of parts",
    ),
]

PlainPrompt = str | list[int] | list[dict[str, Any]]
"""One prompt as ``LLM.completion_prompt`` takes it."""


def plain_prompts(prompt: Prompt) -> list[PlainPrompt]:
    """The prompts of a body: one, unless it is a list of texts or a list of lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], str | list):
        return [entry for entry in prompt if isinstance(entry, str | list)]
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [[part.model_dump() for part in prompt if isinstance(part, BaseModel)]]


def single_prompt(prompt: Prompt) -> PlainPrompt:
    """The prompt of a body that takes only one. Raises InvalidRequestError for several."""
    prompts = plain_prompts(prompt)
    if len(prompts) > 1:
        raise InvalidRequestError("'prompt' must be one prompt here.", param="prompt")
    return prompts[0]


class CompletionBody(GenerationBody):
    """As OpenAI's, with context caches in the prompt. Several prompts give n choices each, in order."""

    refused: ClassVar[dict[str, tuple[Any, ...]]] = GenerationBody.refused | {
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
    }

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=20)

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionBody:
        choices = len(self.plain_prompts()) * self.choices
        if choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"'prompt' and 'n' ask for {choices} choices; at most {MAX_CHOICES} are given in one request.",
                param="n",
            )
        return self

    def plain_prompts(self) -> list[PlainPrompt]:
        return plain_prompts(self.prompt)

    def sampling_params(self) -> SamplingParams:
        return self.sampling(max_tokens=self.max_tokens or DEFAULT_MAX_TOKENS, logprobs=self.logprobs)
