"""Log probabilities of tokens, an answer's and a prompt's, in the formats of OpenAI's routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from kvlinker.base.types.answers import PromptLogprobs, TokenLogprob
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.llm import Prompt

LEAST_LOGPROB = -9999.0
"""OpenAI's value for the log probability of an impossible token: JSON has no infinity."""


def finite(logprob: float) -> float:
    """Return the log probability as a number that JSON can represent."""
    return max(logprob, LEAST_LOGPROB)


class TopLogprob(ResponseBody):
    """A token and its log probability, in nats. ``bytes`` are the token's own: a token that is a
    part of a character has no text."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The token that was sampled, and the most likely ones in its place."""

    top_logprobs: list[TopLogprob]


def logprob_bodies(
    entries: Sequence[TokenLogprob],
    bytes_of: Callable[[int], bytes],
    *,
    as_ids: bool = False,
) -> list[ChatLogprob]:
    """Return log probabilities in the format of chat completions; ``bytes_of`` gives a token's
    bytes, ``as_ids``: with ids in place of the tokens' texts."""

    def fields_of(entry: TokenLogprob) -> dict[str, Any]:
        return {
            "token": token_name(entry, as_ids=as_ids),
            "logprob": finite(entry.logprob),
            "bytes": list(entry_bytes(entry, bytes_of)),
        }

    return [
        ChatLogprob(
            **fields_of(entry), top_logprobs=[TopLogprob(**fields_of(other)) for other in entry.top]
        )
        for entry in entries
    ]


def entry_bytes(entry: TokenLogprob, bytes_of: Callable[[int], bytes]) -> bytes:
    """Return the token's own bytes, which of a part of a character are no text; ``bytes_of`` gives
    those of a token by its id."""
    return bytes_of(entry.token_id) if "\ufffd" in entry.text else entry.text.encode()


def token_name(entry: TokenLogprob, *, as_ids: bool) -> str:
    """Return the token's text, or its id as vLLM writes it."""
    return f"token_id:{entry.token_id}" if as_ids else entry.text


def token_key(entry: TokenLogprob, bytes_of: Callable[[int], bytes], *, as_ids: bool) -> str:
    """Return a name that no other token has: of a part of a character, its bytes as OpenAI writes
    them, such as ``bytes:\\xe2\\x80``."""
    if as_ids or "\ufffd" not in entry.text:
        return token_name(entry, as_ids=as_ids)
    spelt = bytes_of(entry.token_id)
    if spelt == entry.text.encode():
        return entry.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


class TextOffsets:
    """Counts the characters before each token of a text, token by token. All tokens of one
    character have its offset."""

    def __init__(self, tokenizer: Any, *, skips_special: bool, start: int = 0) -> None:
        """``skips_special``: the text is without special tokens. ``start`` counts the characters
        before it."""
        self._tokenizer = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=skips_special)
        self._characters = start

    def add(self, entry: TokenLogprob) -> int:
        """Add the next token, and return its offset."""
        piece = self._stream.step(self._tokenizer, entry.token_id) or ""
        start, own = self._characters, entry.text
        self._characters += len(piece)
        # before it, the piece has bytes that have turned out to be no character
        is_behind = len(piece) > len(own) and piece.endswith(own) and not own.startswith("\ufffd")
        return self._characters - len(own) if is_behind else start


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
