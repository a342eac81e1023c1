"""From generated tokens to text, piece by piece: no half characters, nothing behind a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes one request's output; ``stopped`` once a stop string has appeared.

    Text that could be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now."""
        self._ids.append(token)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token) or ""
        self._decoded += piece
        return self._release(piece)

    def finish(self) -> str:
        """No more tokens come: the rest of the text, incomplete characters as U+FFFD."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        tail = whole[len(self._decoded) :] if whole.startswith(self._decoded) else ""
        text = self._release(tail)
        if self.stopped:
            return text
        text, self._held = text + self._held, ""
        return text

    def _release(self, piece: str) -> str:
        text = self._held + piece
        found = [index for index in (text.find(stop) for stop in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
