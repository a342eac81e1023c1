"""Pieces of equal length, cut at the tokenizer's own token boundaries."""

from __future__ import annotations

from kvlinker.prompting.splitting.limit import TokenLimit
from kvlinker.prompting.splitting.splitter import Splitter, register


@register
class FixedSplitter(Splitter):
    """A piece is as many tokens as the limit allows."""

    name = "fixed"

    def split(self, text: str, limit: TokenLimit) -> list[str]:
        return limit.cut(text)
