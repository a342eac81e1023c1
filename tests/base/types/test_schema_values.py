"""Schemas that no finite value satisfies are told from those that end."""

from __future__ import annotations

from typing import Any

import pytest

from kvlinker.base.types.schema_values import has_finite_value


def object_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


ITSELF: Any = {"$ref": "#"}
ENDLESS: dict[str, Any] = {
    "itself": ITSELF,
    "a property": object_of(next=ITSELF),
    "a definition": {
        "$defs": {"node/1": object_of(next={"$ref": "#/$defs/node~11"})},
        "$ref": "#/$defs/node~11",
    },
    "by turns": {
        "$defs": {
            "a": object_of(b={"$ref": "#/$defs/b"}),
            "b": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
        },
        "$ref": "#/$defs/a",
    },
    "all alternatives": object_of(next={"anyOf": [object_of(a=ITSELF), object_of(b=ITSELF)]}),
    "one of all": object_of(next={"allOf": [{"type": "object"}, ITSELF]}),
    "a first entry": object_of(next={"type": "array", "prefixItems": [ITSELF], "minItems": 1}),
}
ENDING: dict[str, Any] = {
    "anything": True,
    "no schema": ["what", 1],
    "a property that may be left out": {"type": "object", "properties": {"next": ITSELF}},
    "null": object_of(next={"anyOf": [ITSELF, {"type": "null"}]}),
    "an empty list": object_of(next={"type": "array", "items": ITSELF}),
    "a name": object_of(next={"enum": ["a"], "$comment": "ends"}),
    "another type": {"properties": {"next": ITSELF}, "required": ["next"]},
    "an anchor": object_of(next={"$ref": "#node"}),
    "nothing there": object_of(next={"$ref": "#/$defs/0"}),
    "entries by number": {"$ref": "#/allOf/1", "allOf": [True, {"type": "null"}]},
    "a name that is not described": {"type": "object", "required": ["next"]},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless(name: str) -> None:
    assert not has_finite_value(ENDLESS[name])


@pytest.mark.parametrize("name", ENDING)
def test_ending(name: str) -> None:
    assert has_finite_value(ENDING[name])


def test_long_chains_take_no_stack() -> None:
    links: dict[str, Any] = {
        f"d{index}": object_of(next={"$ref": f"#/$defs/d{index + 1}"}) for index in range(5000)
    }
    chain = {"$defs": links, "$ref": "#/$defs/d0"}
    links["d5000"] = {"type": "null"}
    assert has_finite_value(chain)
    links["d5000"] = {"$ref": "#/$defs/d0"}
    assert not has_finite_value(chain)
