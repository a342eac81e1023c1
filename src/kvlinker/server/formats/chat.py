"""Chat completions: the ``chat.completion`` object and its chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from kvlinker.server.formats.base import Choice
from kvlinker.server.formats.logprobs import finite
from kvlinker.server.generation import Outcome
from kvlinker.types.answers import Delta, Finished, TokenLogprob


class ChatFormat:
    """An AnswerFormat."""

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._logprobs = logprobs

    def envelope(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": choices}

    def opening(self, index: int) -> Sequence[Choice]:
        return [_choice(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, delta: Delta) -> Choice:
        return _choice(index, {"content": delta.text}, logprobs=self._logprobs_body(delta.logprobs))

    def closing(self, index: int, finished: Finished) -> Choice:
        return _choice(index, {}, finish_reason=finished.reason)

    def answer(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": outcome.text, "refusal": None},
                "logprobs": self._logprobs_body(outcome.logprobs),
                "finish_reason": outcome.finished.reason,
            }
            for index, outcome in enumerate(outcomes)
        ]
        return {**self._head, "object": "chat.completion", "choices": choices}

    def _logprobs_body(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        content = [_entry(entry) | {"top_logprobs": [_entry(other) for other in entry.top]} for entry in entries]
        return {"content": content, "refusal": None}


def _choice(
    index: int,
    delta: dict[str, str],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> Choice:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _entry(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": finite(entry.logprob), "bytes": list(entry.text.encode())}
