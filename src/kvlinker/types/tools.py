"""Tools that a model may call: functions, each described by OpenAI's definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Tool = Mapping[str, Any]
"""A definition: ``{"type": "function", "function": {"name", "description"?, "parameters"?}}``; parameters are a JSON
schema."""


def function_of(tool: Tool) -> Mapping[str, Any]:
    """Return the function that a definition describes."""
    function: Mapping[str, Any] = tool["function"]
    return function
