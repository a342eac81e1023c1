"""Counts the parts of a JSON schema that make it costly to enforce."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class SchemaSize:
    """Counts a JSON schema, or several."""

    nodes: int
    """Fields, list entries and objects."""

    references: int
    pattern_characters: int
    """The characters of all regular expressions."""

    @classmethod
    def of(cls, schemas: Iterable[Any]) -> Self:
        """Count these schemas, however deeply they are nested."""
        fields = [field for schema in schemas for field in schema_fields(schema)]
        return cls(
            nodes=len(fields) + sum(isinstance(value, dict) for _, value in fields),
            references=sum(name == "$ref" for name, _ in fields),
            pattern_characters=sum(map(len, _patterns(fields))),
        )

    def __add__(self, other: SchemaSize) -> SchemaSize:
        return SchemaSize(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def schema_fields(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield all fields of a schema, nested ones included, with their values, and list entries under
    an empty name."""
    found = [schema]
    while found:
        match found.pop():
            case dict(fields):
                yield from fields.items()
                found += fields.values()
            case list(entries):
                yield from (("", entry) for entry in entries)
                found += entries


def _patterns(fields: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield the regular expressions among a schema's fields."""
    for name, value in fields:
        if name == "pattern" and isinstance(value, str):
            yield value
        elif name == "patternProperties" and isinstance(value, dict):
            yield from value
