"""Values that callers of the Python API write, and their parsing into the values of HTTP bodies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from kvlinker.base.errors import InvalidRequestError, did_you_mean
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    ContextCacheReference,
    Document,
    Implicit,
    MarkedText,
    TextSource,
    TokenIds,
)
from kvlinker.base.types.sampling import SamplingFields
from kvlinker.base.types.texts import SearchHit
from kvlinker.base.types.tools import Tool, template_call
from kvlinker.linking import Policy
from kvlinker.prompting.marks import marked_text
from kvlinker.service.context_caches.kept_answers import KeptPart
from kvlinker.store import ContextCache

ContentPart = str | ContextCache | SearchHit | CachedPart | Mapping[str, Any]
"""A text, a context cache, or one of the HTTP API's content parts."""

ToolChoice = Literal["none", "auto", "required"] | Mapping[str, Any]
"""Whether tools are called: not at all, if the model likes, or in any case; or the one that is to
be called, as ``{"type": "function", "function": {"name"}}``."""

_FIELDS = ("reasoning_content", "tool_calls", "tool_call_id")
"""The fields of a message that chat templates may show in addition to its role, content and
name."""

Message = Mapping[str, Any]
"""A message as Python callers write it: ``role``, ``content`` (a text or a list of ContentPart),
perhaps ``name``, ``tool_calls``, ``tool_call_id`` and ``reasoning_content``."""

CompletionContent = str | TokenIds | Sequence[int | ContentPart]
"""A completion's prompt as Python callers write it: a text, token ids, or a list of texts and
context caches."""


Messages = Sequence[Message | ChatMessage[CachedPart]]
"""A conversation, as dictionaries or as typed messages."""

Documents = Sequence[Mapping[str, Any] | Document[CachedPart]]
"""Documents of a conversation: each has a ``text``, and perhaps a ``title`` and more that chat
templates show."""


Order = Literal["given", "any"]
"""Whether documents, and neighbouring chunks, keep their order."""


class ChatOptions(SamplingFields, total=False):
    """The keyword arguments of ``LLM.chat_completion`` and ``stream``: these, and sampling
    parameters such as ``max_tokens`` and ``temperature``."""

    documents: Documents
    """Documents, which become chunks, as ``implicit`` says, and so do marked parts and marked
    tools."""

    tools: Sequence[Mapping[str, Any]]
    """OpenAI's, as are ``tool_choice``, ``parallel_tool_calls`` and ``response_format``."""

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None

    policy: str | Policy | None
    """A name, or a policy, which need not be registered."""

    order: Order | None
    """"any": documents, and neighbouring chunks, may be reordered as they were linked before, so
    that nothing is computed again."""

    implicit: Implicit | str | None
    """Which texts become chunks without an id: "auto", "marked" or "off"."""

    keep: KeptPart | Literal["off"] | None
    """Which part of the answer becomes a context cache, ``Answer.kept``, with the KV that it was
    generated with; by default, as the settings say."""

    ttl: float | None
    """The seconds that it lives from its last use."""

    workflow: str | None
    """The name of a workflow that this is a request of."""

    next: Sequence[Mapping[str, Any]] | None
    """The context caches that the workflow will use: ``ids`` of context caches, and in how many
    ``steps``, its requests from this one on, or ``seconds``."""

    explain: bool
    """True: the answer has an ``explanation`` of how its prompt was linked."""

    tenant: str


def parse_messages(
    messages: Sequence[Message | ChatMessage[CachedPart]],
) -> tuple[ChatMessage[CachedPart], ...]:
    """Parse a conversation; messages that are typed already stay as they are. Raises
    InvalidRequestError."""
    _require_list("messages", messages, "messages, each with a 'role' and a 'content'")
    return tuple(
        message if isinstance(message, ChatMessage) else _parse_message(index, message)
        for index, message in enumerate(messages)
    )


def parse_prompt(prompt: CompletionContent) -> CompletionPrompt[CachedPart]:
    """Parse the prompt of a completion. Raises InvalidRequestError."""
    if isinstance(prompt, TokenIds):
        return prompt
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, Sequence):
        raise InvalidRequestError(
            f"'prompt' is {prompt!r}, but must be a text, token ids, or a list of texts and context"
            " caches.",
            param="prompt",
        )
    token_ids = tuple(part for part in prompt if isinstance(part, int))
    if len(token_ids) == len(prompt):
        return TokenIds(token_ids)
    if token_ids:
        raise InvalidRequestError(
            "'prompt' mixes token ids with texts or context caches.", param="prompt"
        )
    return tuple(_parse_part(part, "prompt") for part in prompt if not isinstance(part, int))


def parse_documents(
    documents: Sequence[Mapping[str, Any] | Document[CachedPart]],
) -> tuple[Document[CachedPart], ...]:
    """Parse documents, each with a ``text`` and other fields that chat templates may show, such as
    ``title``; typed ones stay as they are. Raises InvalidRequestError."""
    _require_list("documents", documents, "documents, each with a 'text'")
    return tuple(
        document if isinstance(document, Document) else _parse_document(index, document)
        for index, document in enumerate(documents)
    )


def parse_tools(tools: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Parse definitions of tools, as OpenAI's API has them. Raises InvalidRequestError."""
    _require_list("tools", tools, "definitions of tools, as OpenAI's API has them")
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": {"name": str(name), **function}} if name:
                parameters = function.get("parameters")
                if isinstance(parameters, Mapping | None):
                    continue
        raise InvalidRequestError(
            f"Tool {index} is {tool!r}, but must be {{'type': 'function', 'function': {{'name':"
            " …}}, perhaps with a 'description' and 'parameters', a JSON schema.",
            param="tools",
        )
    return tuple({**tool, "function": _given(tool["function"])} for tool in tools)


def refuse_tools_in_text(options: ChatOptions) -> None:
    """Raise InvalidRequestError if the text of an answer is asked for that may have calls."""
    if options.get("tools") and options.get("tool_choice") != "none":
        raise InvalidRequestError(
            "'stream' gives the answer's text alone, in which no calls of 'tools' are: call the"
            " method 'stream', or leave one of them out.",
            param="stream",
        )


def _require_list(name: str, value: Any, of: str) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise InvalidRequestError(f"{name!r} is {value!r}, but must be a list of {of}.", param=name)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def parse_implicit(name: str) -> Implicit:
    """Return the mode of this name. Raises InvalidRequestError for others."""
    try:
        return Implicit(name)
    except ValueError as error:
        raise InvalidRequestError(
            f"'implicit' is {name!r}, but must be one of {', '.join(Implicit)}.",
            param="link.implicit",
        ) from error


def _parse_document(index: int, document: Mapping[str, Any]) -> Document[CachedPart]:
    text = document.get("text") if isinstance(document, Mapping) else None
    if not isinstance(text, str):
        raise InvalidRequestError(
            f"Document {index} is {document!r}, but must be a mapping with a 'text'.",
            param="documents",
        )
    return Document(
        MarkedText(text, source=TextSource.DOCUMENT),
        {name: value for name, value in document.items() if name != "text"},
    )


def _parse_message(index: int, message: Message) -> ChatMessage[CachedPart]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"Message {index} is {message!r}, but must be a mapping with a 'role' and a 'content'.",
            param="messages",
        )
    role, name = message.get("role"), message.get("name")
    if not isinstance(role, str):
        raise InvalidRequestError(
            f"The role of message {index} is {role!r}, but must be a text such as 'user'.",
            param="messages",
        )
    content = message.get("content") or ()
    parts: Any = (content,) if isinstance(content, str) else content
    if not isinstance(parts, Sequence):
        raise InvalidRequestError(
            f"The content of message {index} is {content!r}, but must be a text or a list of texts"
            " and context caches.",
            param="messages",
        )
    if not isinstance(name, str | None):
        raise InvalidRequestError(
            f"The name of message {index} is {name!r}, but must be a text.", param="messages"
        )
    known = {"role", "content", "name", *_FIELDS}
    for field in message.keys() - known:
        if message[field] is not None:
            raise InvalidRequestError(
                f"Message {index} has a field {field!r}, which is not"
                f" known.{did_you_mean(str(field), known)}",
                param="messages",
            )
    fields = {field: message[field] for field in _FIELDS if message.get(field) is not None}
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = _parse_calls(index, calls)
    return ChatMessage(role, tuple(_parse_part(part, "messages") for part in parts), name, fields)


def _parse_calls(index: int, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(
            f"The tool_calls of message {index} are {calls!r}, but must be a list of calls, as"
            " answers have them.",
            param="messages",
        )
    return [template_call(call) for call in calls]


def _parse_part(part: ContentPart, param: str) -> str | CachedPart:
    match part:
        case str() | ContextCacheReference() | MarkedText():
            return part
        case ContextCache() | SearchHit():
            return ContextCacheReference(part.id)
        case {"type": "text", "text": str(text)}:
            return marked_text(part, text, param=param)
        case {"type": "context_cache", "id": str(cache_id)}:
            return ContextCacheReference(cache_id)
        case {"type": "text" | "context_cache" as kind}:
            field = "text" if kind == "text" else "id"
            raise InvalidRequestError(
                f"A content part of type {kind!r} needs {field!r}, a text: {part!r}.", param=param
            )
        case Mapping():
            raise InvalidRequestError(
                f"Content part of type {part.get('type')!r}: only 'text' and 'context_cache' are"
                " supported.",
                param=param,
            )
    raise InvalidRequestError(
        f"A content part is {part!r}, but must be a text, a context cache, or a part with a"
        " 'type'.",
        param=param,
    )
