"""JSON schemas from simple to nasty, for tests of structured output, and others that cannot be
enforced."""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
_SHORT = {"type": "string", "maxLength": 4}

SCHEMAS: dict[str, dict[str, Any]] = {
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "short text": {"type": "string", "minLength": 2, "maxLength": 6},
    "enum of all types": {"enum": ["a", 1, 2.5, None, True, [1, "x"], {"k": "v"}]},
    "constant": {"const": {"deep": [1, {"er": '\u00e9\n"quoted" \\ / \U0001f600'}]}},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer"}, _SHORT],
        "items": False,
        "minItems": 2,
    },
    "closed object": _PERSON,
    "optional properties": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": _SHORT, "c": {"type": "boolean"}},
        "additionalProperties": False,
    },
    "one required of three": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "null"}, "c": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {
            "people": {"type": "array", "items": _PERSON, "minItems": 1, "maxItems": 2},
            "end": _PERSON,
        },
        "required": ["people", "end"],
        "additionalProperties": False,
    },
    "any of": {
        "anyOf": [
            {"type": "integer"},
            _PERSON,
            {"type": "array", "items": {"type": "null"}, "maxItems": 2},
        ]
    },
    "one of what cannot overlap": {
        "oneOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]
    },
    "all of": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"]},
            {"properties": {"a": {"minimum": 3, "maximum": 5}}},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "references": {
        "$defs": {
            "point": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
        },
        "type": "object",
        "properties": {"from": {"$ref": "#/$defs/point"}, "to": {"$ref": "#/$defs/point"}},
        "required": ["from", "to"],
        "additionalProperties": False,
    },
    "linked list": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "boolean"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    "tree": {
        "type": "object",
        "properties": {"children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
        "required": ["children"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,5}(x|yy)?$"},
    "pattern that is not anchored": {"type": "string", "pattern": "[0-9]{2}", "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "formats": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "ip": {"type": "string", "format": "ipv4"},
        },
        "required": ["id", "ip"],
        "additionalProperties": False,
    },
    "bounded number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    "bounded integer": {"type": "integer", "exclusiveMinimum": 17, "maximum": 1003},
    "multiples": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n_[a-c]{1,2}$": {"type": "integer"}, "^s_[a-c]$": _SHORT},
        "additionalProperties": False,
    },
    "strange names": {
        "type": "object",
        "properties": {
            name: {"type": "null"}
            for name in ("", "a b", '"', "\\", "\u00fc\U0001f600", "$ref", "\n")
        },
        "required": ["", '"', "$ref"],
        "additionalProperties": False,
    },
    "nullable text": {"type": ["string", "null"], "maxLength": 3},
    "matrix": {
        "type": "array",
        "items": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 9},
            "minItems": 2,
            "maxItems": 2,
        },
        "minItems": 2,
        "maxItems": 2,
    },
    "tagged union": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"kind": {"const": kind}, kind: _SHORT},
                "required": ["kind", kind],
                "additionalProperties": False,
            }
            for kind in ("cat", "dog", "catalogue")
        ]
    },
    "required but not described": {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "with annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "description": "d",
        "type": "object",
        "properties": {
            "a": {"type": "boolean", "default": True, "examples": [False], "deprecated": True}
        },
        "required": ["a"],
        "additionalProperties": False,
    },
}

UNENFORCEABLE: dict[str, tuple[dict[str, Any], str]] = {
    "unique items": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 3}}, "if"),
    "contains": ({"type": "array", "contains": {"type": "integer"}}, "contains"),
    "property names": ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
    "several properties": ({"items": {"type": "object", "minProperties": 2}}, "minProperties"),
    "dependent": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "overlapping one of": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "remote reference": ({"$ref": "https://example.com/schema.json"}, "example.com"),
    "missing reference": ({"$ref": "#/$defs/none"}, "none"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a).*$"}, "look-ahead"),
    "unknown format": ({"type": "string", "format": "ipv9"}, "ipv9"),
    "unknown type": ({"type": "objekt"}, "objekt"),
    "nothing is valid": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "empty enum": ({"enum": []}, "nsatisfiable"),
    "leniency of its own": ({"x-guidance": {"lenient": True}, "not": {"type": "string"}}, "not"),
}
"""By name, a schema and what its error names."""

_deep: dict[str, Any] = {"type": "integer"}
for _ in range(200):
    _deep = {"type": "array", "items": _deep}
UNENFORCEABLE["too deep"] = (_deep, "recursion")


def check(schema: dict[str, Any], value: Any) -> None:
    """Raise jsonschema's ValidationError unless the value is valid, formats included."""
    Draft202012Validator(schema, format_checker=FormatChecker()).validate(value)
