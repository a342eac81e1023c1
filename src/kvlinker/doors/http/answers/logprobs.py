"""Log probabilities of tokens, an answer's and a prompt's, in the formats of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvlinker.base.types.answers import PromptLogprobs, TokenLogprob
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.llm import Prompt

LEAST_LOGPROB = -9999.0
"""OpenAI's value for the log probability of an impossible token: JSON has no infinity."""


def finite(logprob: float) -> float:
    """Return the log probability as a number that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


class TopLogprob(ResponseBody):
    """A token and its log probability, in nats; ``bytes`` are its text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was sampled, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


def logprob_bodies(entries: Sequence[TokenLogprob], *, as_ids: bool = False) -> list[ChatLogprob]:
    """Return log probabilities in the format of chat completions; ``as_ids``: with ids in place of
    the tokens' texts."""
    return [
        ChatLogprob(
            **_entry(entry, as_ids),
            top_logprobs=[TopLogprob(**_entry(other, as_ids)) for other in entry.top],
        )
        for entry in entries
    ]


def token_name(entry: TokenLogprob, *, as_ids: bool) -> str:
    """Return the token's text, or its id as vLLM writes it."""
    return f"token_id:{entry.token_id}" if as_ids else entry.text


def _entry(entry: TokenLogprob, as_ids: bool) -> dict[str, Any]:
    return {
        "token": token_name(entry, as_ids=as_ids),
        "logprob": finite(entry.logprob),
        "bytes": list(entry.text.encode()),
    }


class PromptLogprob(ResponseBody):
    """The log probability of a token given all tokens before it in the prompt, in nats."""

    logprob: float
    decoded_token: str


PromptLogprobsBody = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, by token id, itself and the likeliest ones in its place; null for
tokens without log probabilities."""


def scored_tokens(
    prompt: Prompt,
    scored: PromptLogprobs | None,
    text_of: Callable[[int], str],
    *,
    most: int | None = None,
) -> list[TokenLogprob | None]:
    """Return an entry for each token of ``prompt``, with ``most`` alternatives or all that there
    are; None for those that are not ``scored``: the ones up to its last context cache, and the
    first after it. ``text_of`` decodes a token alone."""
    if scored is None:
        return [None] * len(prompt)
    entries: list[TokenLogprob | None] = [None] * (len(prompt) - len(scored.token_ids))
    rows = zip(
        scored.token_ids.tolist(),
        scored.logprobs.tolist(),
        scored.top_ids[:, :most].tolist(),
        scored.top_logprobs[:, :most].tolist(),
        strict=True,
    )
    for token, logprob, top_ids, top_logprobs in rows:
        top = tuple(
            TokenLogprob(other, text_of(other), value)
            for other, value in zip(top_ids, top_logprobs, strict=True)
        )
        entries.append(TokenLogprob(token, text_of(token), logprob, top))
    return entries


def prompt_logprobs_body(
    prompt: Prompt,
    scored: PromptLogprobs | None,
    text_of: Callable[[int], str],
    *,
    most: int | None = None,
) -> PromptLogprobsBody | None:
    """Return the field ``prompt_logprobs`` of an answer, with the alternatives of
    ``scored_tokens``; None if it was not asked for."""
    if scored is None:
        return None
    return [
        None
        if entry is None
        else {
            str(one.token_id): PromptLogprob(logprob=finite(one.logprob), decoded_token=one.text)
            for one in (entry, *entry.top)
        }
        for entry in scored_tokens(prompt, scored, text_of, most=most)
    ]
