"""KVSplit: texts into the pieces that become chunks, by splitters that are found by name."""

from kvlinker.splitting.limit import TokenLimit
from kvlinker.splitting.split import MAX_PIECE_TOKENS, split_text
from kvlinker.splitting.splitter import Splitter, cut_at, find_splitter, register, splitters
from kvlinker.types.texts import Piece

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
