"""KVSplit: text to the pieces that become chunks."""

from kvlinker.splitting.split import MAX_PIECE_TOKENS, Piece, SplitMethod, split_text

__all__ = ["MAX_PIECE_TOKENS", "Piece", "SplitMethod", "split_text"]
