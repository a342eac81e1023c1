"""Defines how values of settings are written: lists with commas, shares in percent, JSON."""

from __future__ import annotations

import json
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import BeforeValidator
from pydantic_settings import NoDecode

_Value = TypeVar("_Value")


def _split_commas(value: object) -> object:
    return (
        [part.strip() for part in value.split(",") if part.strip()]
        if isinstance(value, str)
        else value
    )


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_commas)]
"""Several strings, with commas between in a variable or on the command line."""


def _parse_share(value: object) -> object:
    """Read a percentage, such as ``1%``, as a share."""
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            return float(value.strip().removesuffix("%")) / 100
        except ValueError:
            raise ValueError("it must be a share such as 1% or 0.01") from None
    return value


Share = Annotated[float, BeforeValidator(_parse_share)]
"""A share from 0 to 1, which may be written in percent."""


def _parse_json(value: object) -> object:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON: {error}") from error


FromJson = Annotated[_Value, NoDecode, BeforeValidator(_parse_json)]
"""A value that is written as JSON in a variable or on the command line."""


def names_host(url: str, *schemes: str) -> bool:
    """Return whether a URL has one of the schemes and a host, and no port that cannot be."""
    try:
        parts = urlsplit(url)
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port, or an IPv6 address, that is none
        return False
