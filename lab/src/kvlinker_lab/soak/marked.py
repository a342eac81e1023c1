"""Writes conversations whose documents the server is to recognise by their marks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvlinker_lab.load.prompts import Content


@dataclass(frozen=True, slots=True)
class MarkedDocuments:
    """Writes documents as marked texts, of which the server makes context caches by itself."""

    texts: Sequence[str]
    policy: str

    @property
    def options(self) -> Mapping[str, Any]:
        return {"link": {"policy": self.policy}}

    def content(self, documents: Sequence[int], text: str) -> Content:
        mark = {"type": "ephemeral"}
        parts = [
            {"type": "text", "text": self.texts[document], "cache_control": mark}
            for document in documents
        ]
        return [*parts, {"type": "text", "text": text}] if text else parts
