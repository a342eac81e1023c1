"""Decides how far the arguments of each tool follow its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from kvlinker.base.types.grammars import json_style
from kvlinker.base.types.limits import (
    MOST_PATTERN_CHARACTERS,
    MOST_RULES,
    MOST_SCHEMA_CHARACTERS,
    MOST_SCHEMA_NODES,
)
from kvlinker.base.types.schema_size import SchemaSize
from kvlinker.base.types.schema_values import has_finite_value
from kvlinker.base.types.tools import Tool, function_of

MOST_KNOWN = 1024
"""The number of schemas of which it is remembered whether they can be followed."""


def call_schemas(tools: Sequence[Tool], *, lenient: bool) -> Iterator[dict[str, Any]]:
    """Yield the JSON schema of each tool's arguments, as llguidance takes it.

    ``lenient``: that of a function that is not strict is followed as far as a grammar can, and any
    object will do where it cannot at all, or where all together are too large; nothing is refused
    for it.
    """
    room = _Room()
    for tool in tools:
        function = function_of(tool)
        schema = {"type": "object", **(function.get("parameters") or {})}
        if not lenient or function.get("strict"):
            yield {**schema, "x-guidance": json_style()}
            continue
        followed = {**schema, "x-guidance": json_style(lenient=True)}
        can_be = room.takes(followed) and _can_be_followed(json.dumps(followed))
        yield followed if can_be else {"type": "object", "x-guidance": json_style()}


class _Room:
    """Says how many schemas one grammar may have: half of what any grammar may be."""

    def __init__(self) -> None:
        self._size = SchemaSize(0, 0, 0)
        self._characters = 0

    def takes(self, schema: dict[str, Any]) -> bool:
        """Return whether there is room for this one, too, and take it then."""
        size = self._size + SchemaSize.of([schema])
        characters = self._characters + len(json.dumps(schema))
        if (
            size.nodes > MOST_SCHEMA_NODES // 2
            or size.references > MOST_RULES // 2
            or size.pattern_characters > MOST_PATTERN_CHARACTERS // 2
            or characters > MOST_SCHEMA_CHARACTERS // 2
        ):
            return False
        self._size, self._characters = size, characters
        return True


@lru_cache(MOST_KNOWN)
def _can_be_followed(schema: str) -> bool:
    try:
        compiled = LLMatcher.grammar_from_json_schema(schema)
        return has_finite_value(json.loads(schema)) and not LLMatcher.validate_grammar(compiled)
    except (ValueError, RecursionError):
        return False
