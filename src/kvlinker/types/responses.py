"""What a model answers in a conversation, as plain values: text, reasoning, and calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model asks for; ``arguments`` is a JSON object, as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ResponsePiece:
    """New output of an answer, told apart by what it is."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)
