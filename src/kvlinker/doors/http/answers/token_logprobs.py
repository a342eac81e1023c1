"""Log probabilities of an answer's tokens, in the format of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvlinker.base.types.answers import TokenLogprob
from kvlinker.doors.http.answers.answering import finite
from kvlinker.doors.http.fields.bodies import ResponseBody


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
