"""Removes users, passwords and other secrets from URLs and from messages that quote them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import unquote

_USERINFO = re.compile(r"(?<=://)[^\s?#]*@")
_SECRET_PARAMETER = re.compile(
    r"[?&#][^=&#]*(?:pass|pwd|secret|token|key|sig|auth|cred)[^=&#]*=([^&#]+)", re.IGNORECASE
)
_HIDDEN = "***"


def place_of(url: str) -> str:
    """Return the URL without user, password, query and fragment."""
    return _USERINFO.sub("", re.split(r"[?#]", url, maxsplit=1)[0])


def redacted(text: str, url: str) -> str:
    """Return ``text`` with the URL's password, and what else in it looks like a secret, hidden
    wherever it stands."""
    text = text.replace(url, place_of(url))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _secrets(url: str) -> Iterator[str]:
    """Yield the URL's secrets, as written and decoded, even if the URL is not valid."""
    found = [match[1] for match in _SECRET_PARAMETER.finditer(url)]
    for userinfo in _USERINFO.findall(url):
        _, _, password = (
            userinfo[:-1].rpartition(":") if ":" in userinfo else ("", "", userinfo[:-1])
        )
        found.append(password)
    for secret in found:
        yield from {secret, unquote(secret)} - {""}
