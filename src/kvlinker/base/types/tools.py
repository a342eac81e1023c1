"""Tools that a model may call: functions, each described by OpenAI's definition; and its calls of
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from kvlinker.base.errors import InvalidRequestError

Tool = Mapping[str, Any]
"""A definition: ``{"type": "function", "function": {"name", "description"?, "parameters"?,
"strict"?}}``, where parameters are a JSON schema. A mark next to the function, such as
``cache_control``, makes a chunk of it."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for; ``arguments`` is a JSON object, as text, or the
    beginning of one where the answer was cut there."""

    id: str
    name: str
    arguments: str


def function_of(tool: Tool) -> Mapping[str, Any]:
    """Return the function that a definition describes."""
    function: Mapping[str, Any] = tool["function"]
    return function


def shown_tool(tool: Tool) -> Tool:
    """Return a definition as prompts show it, with its marks but without ``strict``, which concerns
    only the grammar."""
    return {
        **tool,
        "function": {name: value for name, value in function_of(tool).items() if name != "strict"},
    }


def parsed_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a call, which may be cut off: the complete part of them is returned. A
    name without its value, and half a word such as ``tru``, are left out. Raises ValueError for
    text that is not the beginning of a JSON object."""
    asked = text.strip() or "{}"
    try:
        parsed, end = json.JSONDecoder().raw_decode(asked)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError:
        parsed, end = from_json(asked, allow_partial="trailing-strings"), len(asked)
    if not isinstance(parsed, dict) or end < len(asked):
        raise ValueError("not a JSON object, nor the beginning of one")
    return parsed


def template_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of the assistant's, as OpenAI's API has it, as chat templates take it: with
    arguments that are no text, also where it was cut. Raises InvalidRequestError (``messages``) for
    one that has no name, or whose arguments are not the beginning of a JSON object."""
    function = call.get("function")
    name, arguments = (
        (function.get("name"), function.get("arguments"))
        if isinstance(function, Mapping)
        else (None, None)
    )
    try:
        parsed = (
            parsed_arguments(arguments or "") if isinstance(arguments, str | None) else arguments
        )
    except ValueError:
        parsed = None
    if not isinstance(name, str) or not isinstance(parsed, Mapping):
        raise InvalidRequestError(
            f"A call of a tool is {dict(call)!r}, but needs a 'function' with a 'name' and"
            " 'arguments', a JSON object.",
            param="messages",
        )
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": name, "arguments": dict(parsed)},
    }
