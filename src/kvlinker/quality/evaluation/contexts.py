"""Contexts into the passages that become chunks, as ``--split`` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvlinker.prompting.encoding import TextEncoder
from kvlinker.prompting.splitting import Piece, split_text


class ContextSplit(StrEnum):
    """``SEMANTIC``: passages as the data gives them, else whole paragraphs. ``FIXED``: windows of
    equal length."""

    SEMANTIC = "semantic"
    FIXED = "fixed"


@dataclass(frozen=True)
class ContextSplitter:
    """Cuts contexts into passages of at most ``max_tokens`` tokens of the model's tokenizer."""

    encoder: TextEncoder
    split: ContextSplit = ContextSplit.SEMANTIC
    max_tokens: int = 512

    def pieces(self, context: str) -> tuple[Piece, ...]:
        """The passages of a context that comes in one; joined, they are the context again."""
        method = "passage" if self.split is ContextSplit.SEMANTIC else "fixed"
        return split_text(
            context, tokenizer=self.encoder, method=method, max_tokens=self.max_tokens
        )

    def cut(self, context: str) -> tuple[str, ...]:
        """The texts of ``pieces``."""
        return tuple(piece.text for piece in self.pieces(context))

    def passages(self, given: Sequence[str]) -> tuple[str, ...]:
        """Passages of a context that comes in several: as they are, whatever their length, or cut
        anew if ``FIXED``."""
        return tuple(given) if self.split is ContextSplit.SEMANTIC else self.cut("".join(given))
