"""Shows in a notebook how a prompt's tokens were computed: HTML for ``_repr_html_``."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from itertools import groupby
from typing import Literal

from kvlinker.base.types.answers import Usage

State = Literal["cached", "recomputed", "fresh"]
"""How a token was computed: its KV was kept, computed again, or computed for the first time."""

_COLOURS: dict[State, str] = {"cached": "#23875d", "recomputed": "#c77700", "fresh": "#4a6fd4"}

_LINES: dict[State, str] = {"cached": "solid", "recomputed": "double", "fresh": "dotted"}
"""The states can be distinguished without colours."""


def tokens_html(texts: Sequence[str], states: Sequence[State]) -> str:
    """Return tokens with the colours of their states; neighbours of one state are one element."""
    parts = []
    for state, run in groupby(zip(states, texts, strict=True), key=lambda token: token[0]):
        text = escape("".join(text for _, text in run))
        style = f"background: {_COLOURS[state]}22; border-bottom: 3px {_LINES[state]}"
        parts.append(f'<span style="{style} {_COLOURS[state]}" title="{state}">{text}</span>')
    return f'<div style="white-space: pre-wrap; line-height: 1.9">{"".join(parts)}</div>'


def usage_html(usage: Usage) -> str:
    """Return a bar and a sentence that say how much of a prompt came from the cache."""
    counts: dict[State, int] = {
        "cached": usage.cached_tokens,
        "recomputed": usage.recomputed_tokens,
        "fresh": usage.fresh_tokens,
    }
    bar = "".join(
        f'<span style="flex: {count}; background: {_COLOURS[state]}" title="{state}"></span>'
        for state, count in counts.items()
        if count
    )
    return (
        f'<div style="display: flex; height: 6px; max-width: 40em">{bar}</div>'
        f"<div><small>{usage.prompt_tokens} prompt tokens: {usage.cached_tokens} from the cache,"
        f" {usage.recomputed_tokens} computed again, {usage.fresh_tokens} new.</small></div>"
    )


def text_html(text: str) -> str:
    """Return plain text as it is written."""
    return f'<div style="white-space: pre-wrap">{escape(text)}</div>'
