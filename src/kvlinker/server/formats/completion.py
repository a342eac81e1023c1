"""Completions: the ``text_completion`` object, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from kvlinker.server.formats.base import Choice
from kvlinker.server.formats.logprobs import finite
from kvlinker.server.generation import Outcome
from kvlinker.types.answers import Delta, Finished, TokenLogprob


class CompletionFormat:
    """An AnswerFormat."""

    def __init__(self, model: str, *, logprobs: bool) -> None:
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs = logprobs
        self._offsets: defaultdict[int, int] = defaultdict(int)

    def envelope(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._head, "choices": choices}

    def opening(self, index: int) -> Sequence[Choice]:
        return []

    def delta(self, index: int, delta: Delta) -> Choice:
        return self._choice(index, delta.text, delta.logprobs, None)

    def closing(self, index: int, finished: Finished) -> Choice:
        return self._choice(index, "", (), finished.reason)

    def answer(self, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        return self.envelope(
            [
                self._choice(index, outcome.text, outcome.logprobs, outcome.finished.reason)
                for index, outcome in enumerate(outcomes)
            ]
        )

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprob], finish_reason: str | None) -> Choice:
        return {
            "index": index,
            "text": text,
            "logprobs": self._logprobs_body(index, entries),
            "finish_reason": finish_reason,
        }

    def _logprobs_body(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """``text_offset`` counts the characters of the tokens that the choice had before, over all chunks."""
        if not self._logprobs:
            return None
        offsets = []
        for entry in entries:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(entry.text)
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [{one.text: finite(one.logprob) for one in (entry, *entry.top)} for entry in entries],
            "text_offset": offsets,
        }
