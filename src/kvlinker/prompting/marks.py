"""Reads the marks by which callers of other providers' APIs say that a text is worth caching."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.messages import MarkedText

_TTL_PATTERN = r"[1-9][0-9]{0,5}[smh]"
"""Matches a time to live as marks have it: ``"5m"``, ``"1h"``, ``"90s"``."""

LONGEST_TTL = 24 * 3600.0
"""The most seconds that a mark may ask for; longer lives are for context caches with a name."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def ttl_seconds(text: str) -> float:
    """Return the seconds of a time to live such as ``"5m"``. Raises ValueError."""
    if not re.fullmatch(_TTL_PATTERN, text):
        raise ValueError(f"{text!r} is no time to live: write a number and s, m or h, such as '5m'")
    seconds = int(text[:-1]) * _SECONDS[text[-1]]
    if seconds > LONGEST_TTL:
        raise ValueError(f"{text!r} is longer than a day, the most that a mark may ask for")
    return seconds


def marked_text(part: Mapping[str, Any], text: str, *, param: str) -> str | MarkedText:
    """Return the text of a content part, marked where the part says ``cache_control`` (Anthropic's
    form) or ``prompt_cache_breakpoint`` (OpenAI's). Raises InvalidRequestError for a mark of
    another form."""
    control, breakpoint_ = part.get("cache_control"), part.get("prompt_cache_breakpoint")
    if breakpoint_ is not None and breakpoint_ != {"mode": "explicit"}:
        raise InvalidRequestError(
            f"'prompt_cache_breakpoint' is {breakpoint_!r}, but must be {{'mode': 'explicit'}}.",
            param=param,
        )
    match control:
        case None:
            return text if breakpoint_ is None else MarkedText(text)
        case {"type": "ephemeral", "ttl": str(ttl)}:
            try:
                return MarkedText(text, ttl_seconds(ttl))
            except ValueError as error:
                raise InvalidRequestError(f"'cache_control': {error}.", param=param) from None
        case {"type": "ephemeral"} if control.get("ttl") is None:
            return MarkedText(text)
    raise InvalidRequestError(
        f"'cache_control' is {control!r}, but must be {{'type': 'ephemeral'}}, perhaps with a 'ttl'"
        " such as '5m'.",
        param=param,
    )
