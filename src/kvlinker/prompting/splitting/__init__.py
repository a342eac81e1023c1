"""KVSplit: texts into the pieces that become chunks, by splitters that are found by name."""

from kvlinker.base.types.texts import Piece
from kvlinker.prompting.splitting.limit import TokenLimit
from kvlinker.prompting.splitting.splitter import (
    MAX_PIECE_TOKENS,
    Splitter,
    cut_at,
    find_splitter,
    register,
    split_text,
    splitters,
)

__all__ = [
    "MAX_PIECE_TOKENS",
    "Piece",
    "Splitter",
    "TokenLimit",
    "cut_at",
    "find_splitter",
    "register",
    "split_text",
    "splitters",
]
