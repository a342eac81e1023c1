"""Texts of chunks: pieces of documents before they are cached, and what reading and searching
cached chunks gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a text."""

    text: str

    tokens: int
    """The number of ids of a chunk with this text."""

    start: int
    """The index of its first character in the text."""

    @property
    def end(self) -> int:
        """The index after its last character in the text."""
        return self.start + len(self.text)


@dataclass(frozen=True, slots=True)
class CacheContent:
    """The content of a context cache."""

    id: str

    text: str
    """Its token ids, decoded; special tokens such as BOS are left out."""

    token_ids: tuple[int, ...]
    """The ids that stand in a prompt for it."""

    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class SearchHit:
    """A context cache whose text has words of a query, or means what it does."""

    id: str

    score: float
    """The database's rank (BM25 in SQLite, ``ts_rank`` in PostgreSQL), or a sum of reciprocal
    ranks; higher is better. It compares the hits of one query with one another only."""

    text: str
    tokens: int
    metadata: Mapping[str, str]
