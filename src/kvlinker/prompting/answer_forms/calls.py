"""The form in which one model writes calls: the texts around their names and arguments, and how far
the arguments of each tool follow its schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

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

FENCES = ("", "```", "```json")
"""Stand before the JSON object of a call that is written without its marks."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts of calls, from the folder's files. A call is its *head*, with the name, its
    arguments, a JSON object, and its *tail*."""

    trigger: str | None
    opening: str
    call: str
    between: str | None
    closing: str

    bare: str | None
    """The JSON object in a call, which counts as one also without the text around it, in a line of
    its own or in a fence of Markdown; None if it does not."""

    @classmethod
    def of(cls, calls: Mapping[str, str | None], chat_template: str) -> Self:
        """Take the field ``calls`` of a file, for the model of this chat template. Its calls may be
        bare where the template shows the JSON object, or has no tools, so that kvlinker's own
        section does."""
        found = re.search(r'\{"name": "\{name\}", "(\w+)": \{arguments\}\}', calls["call"] or "")
        shown = found and re.search(rf'"{found[1]}\\?":', chat_template)
        return cls(
            calls["trigger"],
            calls.get("open") or "",
            calls["call"] or "",
            calls["between"],
            calls.get("close") or "",
            found[0] if found and (shown or "tools" not in chat_template) else None,
        )

    @property
    def tail(self) -> str:
        """The text after the arguments of a call."""
        return self.call.partition("{arguments}")[2]

    @property
    def calls_begin_alike(self) -> bool:
        """True if every call begins with the trigger, not only the first one."""
        return self.trigger is not None and self.trigger in self.call

    def first_head(self, name: str) -> str:
        """Return the text before the arguments of the first call."""
        return self.opening + self._head(name)

    def next_head(self, name: str) -> str:
        """Return the text between the tail of a call and the arguments of the next one."""
        return (self.between or "") + self._head(name)

    def told_by(self, head: str) -> str:
        """Return the beginning of a ``head`` that identifies the name: up to the character after
        it. Where calls have no trigger, and other JSON may begin alike, it is all of it."""
        behind = self._before_arguments.partition("{name}")[2]
        return head if self.trigger is None else head[: len(head) - len(behind) + 1]

    def bare_heads(self, name: str) -> list[str]:
        """Return the beginnings of bare calls up to the brace of their arguments, without space."""
        if self.bare is None:
            return []
        head = self.bare.partition("{arguments}")[0].replace("{name}", json.dumps(name)[1:-1])
        return [fence + "".join(head.split()) + "{" for fence in FENCES]

    def bare_pattern(self, name: str, *, is_next: bool = False) -> str:
        """Return the regular expression of the beginnings of bare calls before their arguments,
        where ``name`` is one, too. Before the fence of a call that ``is_next``, another one may
        end, so that it has to name JSON."""
        head = (self.bare or "").partition("{arguments}")[0]
        parts = [re.escape(part) for part in re.findall(r'"[^"]*"|[^"\s]', head)]
        fence = r"(```json\s*)?" if is_next else r"(```(json)?\s*)?"
        return fence + r"\s*".join(parts).replace(r"\{name\}", name)

    @property
    def _before_arguments(self) -> str:
        return self.call.partition("{arguments}")[0]

    def _head(self, name: str) -> str:
        return self._before_arguments.replace("{name}", json.dumps(name)[1:-1])


MOST_KNOWN = 1024
"""The number of schemas of which it is remembered whether they can be followed."""


def call_schemas(tools: Sequence[Tool], *, lenient: bool) -> Iterator[dict[str, Any]]:
    """Yield the JSON schema of each tool's arguments, as llguidance takes it. A function whose
    properties are none has no arguments, unless its schema allows additional ones.

    ``lenient``: that of a function that is not strict is followed as far as a grammar can, and any
    object will do where it cannot at all, or where all together are too large; nothing is refused
    for it.
    """
    room = _Room()
    for tool in tools:
        function = function_of(tool)
        parameters = function.get("parameters") or {"properties": {}}
        closed = {"additionalProperties": False} if parameters.get("properties") == {} else {}
        schema = {"type": "object", **closed, **parameters}
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
