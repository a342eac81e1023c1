"""Checks what callers of the library give for context caches, by the limits that HTTP has: what one
door lets in, the others have to show."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from kvlinker.base.errors import InvalidRequestError, shortened
from kvlinker.base.types.chunks import (
    END_OF_TIME,
    LONGEST_KEY,
    LONGEST_NAME,
    LONGEST_VALUE,
    MAX_TTL,
    MOST_PAIRS,
    UNCHANGED,
    ContextCache,
    Unchanged,
)

_MOST_RESULTS = 2**31 - 1

_SHOWN_CHARACTERS = 80
"""The most characters of a value that an error shows."""


def texts_of(chunks: str | Sequence[str]) -> Sequence[str]:
    """Return the texts of chunks, of which a string is one. Raises InvalidRequestError for what is
    neither a text nor a list of texts."""
    if isinstance(chunks, str):
        return (chunks,)
    if not isinstance(chunks, Sequence) or isinstance(chunks, bytes | bytearray):
        raise _invalid("chunks", chunks, "a text or a list of texts")
    for index, text in enumerate(chunks):
        if not isinstance(text, str):
            raise _invalid(f"chunks.{index}", text, "a text")
    return chunks


def expiry_of(ttl: float) -> float:
    """Return the time in Unix seconds when a ``ttl`` from now is over. Raises
    InvalidRequestError."""
    check_ttl(ttl)
    return time.time() + float(ttl)


def check_ttl(ttl: float) -> None:
    """Check the seconds for which something is to live. Raises InvalidRequestError."""
    if not _is_number(ttl) or not 0 < ttl <= MAX_TTL:
        raise _invalid(
            "ttl",
            ttl,
            f"a positive number of seconds, at most {MAX_TTL:,.0f}. Leave it out, or give None, for"
            " one that lives until it is deleted",
        )


def check_fields(
    *,
    expires_at: float | Unchanged | None = UNCHANGED,
    name: str | Unchanged | None = UNCHANGED,
    metadata: Mapping[str, str] | Sequence[Mapping[str, str]] | Unchanged | None = UNCHANGED,
    pinned: bool | Unchanged = UNCHANGED,
) -> None:
    """Check the fields of new or changed context caches. Raises InvalidRequestError."""
    if not (
        expires_at is None
        or isinstance(expires_at, Unchanged)
        or (_is_number(expires_at) and abs(expires_at) <= END_OF_TIME)
    ):
        raise _invalid(
            "expires_at", expires_at, f"a time in Unix seconds, at most {END_OF_TIME:,.0f}"
        )
    if name is not UNCHANGED and name is not None and not _is_text(name, 1, LONGEST_NAME):
        raise _invalid("name", name, f"a text of 1 to {LONGEST_NAME} characters")
    if metadata is not UNCHANGED and metadata is not None:
        alone = isinstance(metadata, Mapping) or not isinstance(metadata, Sequence)
        for pairs in (metadata,) if alone else metadata:
            check_pairs(pairs)
    if pinned is not UNCHANGED and not isinstance(pinned, bool):
        raise _invalid("pinned", pinned, "True or False")


def check_pairs(pairs: Any) -> None:
    """Check pairs of metadata. Raises InvalidRequestError."""
    if not isinstance(pairs, Mapping) or len(pairs) > MOST_PAIRS:
        raise _invalid(
            "metadata", pairs, f"at most {MOST_PAIRS} pairs of texts, such as {{'project': 'x'}}"
        )
    for key, value in pairs.items():
        if not _is_text(key, 0, LONGEST_KEY):
            raise _invalid(
                "metadata", key, f"a text of at most {LONGEST_KEY} characters", what="A key of"
            )
        if not _is_text(value, 0, LONGEST_VALUE):
            raise _invalid(
                f"metadata.{key}",
                value,
                f"a text of at most {LONGEST_VALUE} characters: write numbers as texts",
            )


def check_tenant(tenant: str) -> None:
    """Check the name of a tenant. Raises InvalidRequestError."""
    if not _is_text(tenant, 1, None):
        raise _invalid("tenant", tenant, "a text that is not empty")


def id_of(cache: ContextCache | str) -> str:
    """Return the id of a context cache that is given by its id or as it was returned. Raises
    InvalidRequestError for what is neither."""
    if isinstance(cache, ContextCache):
        return cache.id
    if not isinstance(cache, str):
        raise _invalid("cache", cache, "a context cache, or the id of one")
    return cache


def check_query(query: str) -> None:
    """Check that a query is a text. Raises InvalidRequestError."""
    if not isinstance(query, str):
        raise _invalid("query", query, "a text")


def check_order(order: str) -> None:
    """Check the order of a listing. Raises InvalidRequestError."""
    if order not in ("asc", "desc"):
        raise _invalid("order", order, "'asc' or 'desc'")


def check_limit(limit: int) -> None:
    """Check the most results that a caller wants. Raises InvalidRequestError."""
    if not isinstance(limit, int) or isinstance(limit, bool):
        raise _invalid("limit", limit, "a whole number")
    if not 1 <= limit <= _MOST_RESULTS:
        raise _invalid("limit", limit, f"from 1 to {_MOST_RESULTS:,}")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_text(value: Any, least: int, most: int | None) -> bool:
    """Return whether this is a text of ``least`` to ``most`` characters, all of which UTF-8 can
    write."""
    if not isinstance(value, str) or len(value) < least or (most is not None and len(value) > most):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _invalid(param: str, value: Any, allowed: str, *, what: str = "") -> InvalidRequestError:
    shown = shortened(repr(value), _SHOWN_CHARACTERS)
    subject = f"{what} {param!r}".strip()
    return InvalidRequestError(f"{subject} is {shown}, but must be {allowed}.", param=param)
