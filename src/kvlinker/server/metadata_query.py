"""Pairs of metadata in a query string: ``metadata[project]=x``, as OpenAI's API and clients write them."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import Depends, Request

from kvlinker.errors import InvalidRequestError
from kvlinker.server.bodies.base import MAX_PAIRS

METADATA_PARAMETER: dict[str, Any] = {
    "parameters": [
        {
            "name": "metadata",
            "in": "query",
            "required": False,
            "style": "deepObject",
            "explode": True,
            "description": "Pairs that a context cache must have, all of them: metadata[project]=x.",
            "schema": {"type": "object", "additionalProperties": {"type": "string"}},
        }
    ]
}
"""For a route's ``openapi_extra``: what ``MetadataParam`` reads."""


async def _metadata(request: Request) -> dict[str, str]:
    """Raises InvalidRequestError for parameters that only look like pairs, and for one key with several values."""
    pairs: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if not name.startswith("metadata"):
            continue
        match = re.fullmatch(r"metadata\[(.*)\]", name, re.DOTALL)
        if match is None:
            raise InvalidRequestError(f"{name!r} is no pair of metadata. Write metadata[project]=x.", param="metadata")
        if pairs.setdefault(match[1], value) != value:
            raise InvalidRequestError(f"{name!r} is given with two values; no context cache has both.", param=name)
    if len(pairs) > MAX_PAIRS:
        raise InvalidRequestError(
            f"{len(pairs)} pairs of metadata; no context cache has more than {MAX_PAIRS}.", param="metadata"
        )
    return pairs


MetadataParam = Annotated[dict[str, str], Depends(_metadata)]
