"""Finds JSON schemas under which every value would have to be infinite, such as that of an entry
that must have a next one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote


class _Node(NamedTuple):
    """A part of a schema, which has a finite value if all of ``needs``, or ``any_of`` them, have
    one."""

    needs: list[int]
    any_of: bool = False


def has_finite_value(schema: Any) -> bool:
    """Return whether a finite value may satisfy ``schema``, by its references and by what it
    requires. Other contradictions are left to the compiler of grammars."""
    nodes: list[_Node] = []
    known: dict[int, int] = {}
    unread: list[tuple[int, Any]] = []

    def node_of(part: Any) -> int:
        if id(part) not in known:
            known[id(part)] = len(nodes)
            unread.append((len(nodes), part))
            nodes.append(_Node([]))
        return known[id(part)]

    root = node_of(schema)
    while unread:
        index, part = unread.pop()
        needs = [node_of(each) for each in _all_of(schema, part)]
        for alternatives in _any_of(part):
            needs.append(len(nodes))
            nodes.append(_Node([], any_of=True))
            nodes[needs[-1]].needs.extend(map(node_of, alternatives))
        nodes[index] = _Node(needs)
    return root in _finite(nodes)


def _finite(nodes: list[_Node]) -> set[int]:
    """Return the nodes that have a finite value, beginning with those that need none."""
    users = defaultdict(list)
    for index, node in enumerate(nodes):
        for needed in node.needs:
            users[needed].append(index)
    missing = [1 if node.any_of else len(node.needs) for node in nodes]
    found: set[int] = set()
    ready = [index for index, count in enumerate(missing) if not count]
    while ready:
        index = ready.pop()
        if index in found:
            continue
        found.add(index)
        for user in users[index]:
            missing[user] -= 1
            if missing[user] == 0:
                ready.append(user)
    return found


def _all_of(schema: Any, part: Any) -> Iterator[Any]:
    """Yield the schemas of ``part`` that must all have a value for it to have one."""
    if not isinstance(part, dict):
        return
    if (target := _target(schema, part.get("$ref"))) is not None:
        yield target
    if "enum" in part or "const" in part:
        return
    yield from _list(part.get("allOf"))
    if part.get("type") == "object":
        properties = part.get("properties")
        for name in _list(part.get("required")):
            if isinstance(properties, dict) and isinstance(name, str) and name in properties:
                yield properties[name]
    elif part.get("type") == "array" and isinstance(least := part.get("minItems"), int):
        first = _list(part.get("prefixItems"))
        yield from first[:least]
        if least > len(first) and "items" in part:
            yield part["items"]


def _any_of(part: Any) -> Iterator[list[Any]]:
    """Yield lists of schemas of ``part``, of each of which one must have a value."""
    if isinstance(part, dict) and not part.keys() & {"enum", "const"}:
        for name in ("anyOf", "oneOf"):
            if alternatives := _list(part.get(name)):
                yield alternatives


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _target(schema: Any, reference: Any) -> Any:
    """Return the part of a schema that a reference names; None for one that is not found."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    part = schema
    for name in unquote(reference[1:]).split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list) and name.isdecimal() and int(name) < len(part):
            part = part[int(name)]
        elif isinstance(part, dict) and name in part:
            part = part[name]
        else:
            return None
    return part
