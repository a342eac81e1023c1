"""Writes a line of JSON for each compared answer: hashes and figures, and texts only if the
settings ask for them."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from kvlinker.base.errors import InvalidRequestError
from kvlinker.service.audit.comparison import Comparison, ServedAnswer


class AuditJournal:
    """A file of JSON Lines that is appended to. It can be rotated by moving it, without loss: each
    line opens it again. Only the audit's thread writes."""

    def __init__(
        self, path: Path, *, model: str, decode: Callable[[Sequence[int]], str] | None = None
    ) -> None:
        """Write to ``path``. ``decode`` turns token ids into the texts that lines have, too;
        without it they have none.

        Raises InvalidRequestError if the file cannot be written.
        """
        self._path = path
        self._model = model
        self._decode = decode
        try:
            self._append("")
        except OSError as error:
            raise InvalidRequestError(
                f"Cannot write {path}: {error.strerror}.", param="audit_log"
            ) from error

    def write(self, answer: ServedAnswer, found: Comparison) -> None:
        """Append the line of an answer. Raises OSError."""
        self._append(json.dumps(self._line(answer, found), ensure_ascii=False) + "\n")

    def _append(self, text: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)

    def _line(self, answer: ServedAnswer, found: Comparison) -> dict[str, Any]:
        line = {
            "time": round(time.time(), 3),
            "model": self._model,
            "policy": answer.policy,
            "tenant": answer.tenant,
            **answer.kind._asdict(),
            "prompt_tokens": len(answer.prompt),
            "cached_tokens": answer.usage.cached_tokens,
            "recomputed_tokens": answer.usage.recomputed_tokens,
            "answer_tokens": len(answer.token_ids),
            "prompt_sha256": _digest(answer.prompt.tokens.tolist()),
            "answer_sha256": _digest(answer.token_ids),
            **asdict(found),
            "alike": found.alike,
        }
        if self._decode is not None:
            line |= {
                "prompt": self._decode(answer.prompt.tokens.tolist()),
                "answer": self._decode(answer.token_ids),
            }
        return line


def _digest(token_ids: Sequence[int]) -> str:
    """Return the SHA-256 of token ids as 64-bit little-endian numbers, in hexadecimal."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()
