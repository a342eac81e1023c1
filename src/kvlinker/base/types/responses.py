"""Kept answers of the Responses API, as the catalog keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response as it is kept. Its texts are JSON, which the catalog does not read."""

    id: str

    body: str
    """The response without its output."""

    input: str
    """The items of the request's own input."""

    output: Mapping[str, str]
    """The items of the output, by id."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A response's part of a conversation: the items of its request, and those of its output."""

    input: str
    output: Sequence[str]
