"""Messages of conversations as OpenAI's API has them, for every route that takes some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from kvlinker.base.types.limits import MOST_CALLS
from kvlinker.base.types.messages import CachedPart, ChatMessage
from kvlinker.doors.http.fields.bodies import RequestBody, Text, is_given, where
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.parts import TextOrParts, content_of
from kvlinker.doors.http.fields.tools import ToolCallBody


def unless_role(role: str, others: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return a schema that holds messages of all other roles to the schema ``others``."""
    return where({"role": {"not": {"const": role}}}, others)


class MessageBody(RequestBody):
    """One turn of a conversation; only an assistant's may have no content. The assistant's
    ``reasoning_content``, or ``reasoning``, is shown by chat templates that know it; fields that
    are not known here are shown by none. A message of role ``tool`` is the result of the call
    ``tool_call_id``."""

    model_config = ConfigDict(extra="ignore")

    place: ClassVar[Place | None] = Place.MESSAGE
    rules: ClassVar[tuple[dict[str, JsonValue], ...]] = (
        unless_role("assistant", is_given("content")),
        unless_role("assistant", {"properties": {"tool_calls": {"enum": [None, []]}}}),
        unless_role("tool", {"properties": {"tool_call_id": {"enum": [None, ""]}}}),
        where(
            {"role": {"const": "tool"}},
            {
                "required": ["tool_call_id"],
                "properties": {"tool_call_id": {"minLength": 1, "type": "string"}},
            },
        ),
    )

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: TextOrParts | None = None
    name: Text | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: list[ToolCallBody] | None = Field(default=None, max_length=MOST_CALLS)
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_roles(cls, data: Any) -> Any:
        """Refuse a message without content that needs some, fields of another role, and a result
        without the id of its call."""
        if not isinstance(data, dict):
            return data
        if data.get("content") is None and data.get("role", "assistant") != "assistant":
            if "content" not in data:
                raise cls._refusal("content", data, "missing")
            kind = PydanticCustomError("content_type", "Input should be text or a list of parts")
            raise cls._refusal("content", None, kind)
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if data.get(name) and data.get("role", role) != role:
                kind = PydanticCustomError("unsupported_parameter", "not supported; leave it out")
                raise cls._refusal(name, data[name], kind)
        if data.get("role") == "tool" and not data.get("tool_call_id"):
            raise cls._refusal("tool_call_id", data, "missing")
        return data

    def message(self) -> ChatMessage[CachedPart]:
        """Return the message as the library takes it. ``developer`` becomes ``system``, since few
        chat templates know that newer role."""
        content = (
            (self.content,) if isinstance(self.content, str) else content_of(self.content or ())
        )
        role = "system" if self.role == "developer" else self.role
        return ChatMessage(role, content, self.name, self._template_fields())

    def _template_fields(self) -> Mapping[str, Any]:
        """Return the other fields of the message that chat templates may show."""
        fields: dict[str, Any] = {}
        thoughts = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if self.role == "assistant" and thoughts is not None:
            fields |= dict.fromkeys(("reasoning_content", "reasoning"), thoughts)
        if self.tool_calls:
            fields["tool_calls"] = [call.template_call() for call in self.tool_calls]
        if self.tool_call_id is not None:
            fields["tool_call_id"] = self.tool_call_id
        return fields
