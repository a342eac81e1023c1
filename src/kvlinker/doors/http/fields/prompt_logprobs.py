"""The log probabilities of a prompt's tokens, in the format of answers."""

from __future__ import annotations

from collections.abc import Callable

from kvlinker.base.types.answers import PromptLogprobs, TokenLogprob
from kvlinker.doors.http.answers.answering import finite
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.llm import Prompt


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
