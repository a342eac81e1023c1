"""Renders chat messages through the model's chat template into a prompt's parts, for
``PromptBuilder``.

Tools and documents go into messages where a template has no places of their own for them; calls are
then written as Hermes's models do, which many others know, too. No template is known by name: how
it writes a tool is seen by rendering a prompt with the tool once and twice.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from jinja2 import TemplateSyntaxError

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import ChatMessage, Document, TemplateOptions
from kvlinker.base.types.tools import Tool, function_of
from kvlinker.prompting.encoding import require_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DEFAULT_OPTIONS = TemplateOptions()

NO_DEFINITIONS: Mapping[str, Chunk] = MappingProxyType({})

MOST_DEFINITIONS = 512
"""The tools whose definitions' texts are remembered; of more, those that were asked for last."""

LONGEST_DEFINITION = 1 << 14
"""The characters of a tool, as JSON, beyond which the text of its definition is not remembered."""

_INTRODUCTION = (
    "# Tools\n\nThese functions can be called. "
    "Each line describes one, with a JSON schema of its arguments:\n"
)
_INSTRUCTIONS = (
    "\nTo call one, write its name and its arguments as JSON between these tags, and then wait for"
    ' the result:\n<tool_call>\n{"name": "NAME", "arguments": {}}\n</tool_call>'
)

_GAP = "\n\n"
"""Stands after every document."""

_Text = TypeVar("_Text")
"""The type of a document's text."""

Message = ChatMessage[Chunk]

_PROBE: ChatMessage[Chunk] = ChatMessage("user", ("text",))


class ChatTemplate:
    """Renders messages with a Jinja chat template, whatever that does with their content.

    A template sees a unique word in place of each chunk; the rendered text is cut at these words
    again. So a template may trim, wrap, reorder or refuse its input, and the chunk's tokens stay as
    they are.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None
    ) -> None:
        """Compile ``chat_template``, or else the tokenizer's own. Raises ModelLoadError if it is no
        valid Jinja."""
        self._tokenizer = tokenizer
        self._template: str | None
        try:
            self._template = tokenizer.get_chat_template(chat_template)
        except ValueError:
            self._template = None
        self._takes_documents = re.search(r"\bdocuments\b", self._template or "") is not None
        self._definition = lru_cache(MOST_DEFINITIONS)(self._find_definition)
        with suppress(InvalidRequestError):
            self.render([_PROBE])

    @property
    def source(self) -> str | None:
        """The template in Jinja; None if the model has none."""
        return self._template

    def render(
        self,
        messages: Sequence[ChatMessage[Chunk]],
        documents: Sequence[Document[Chunk]] = (),
        *,
        options: TemplateOptions = DEFAULT_OPTIONS,
        definitions: Mapping[str, Chunk] = NO_DEFINITIONS,
    ) -> list[str | Chunk]:
        """Return the prompt's texts and chunks in order, up to where the assistant's answer begins.

        Tools and documents go where the template shows them, and into the messages where it shows
        no tools, or does not show each document once. Chunks take the places of ``definitions``,
        texts that ``definition`` gave, where each stands in the prompt just once. Raises
        InvalidRequestError (``messages``) when there is no template, when it raises, or when it
        does not show every chunk exactly once. Variables that the template has not are left out.
        Names of messages are left to it, which may show them or not.
        """
        shown: list[str | Chunk] | None = None
        if documents and self._takes_documents:
            # Some templates mention documents, and show only titles, or each twice.
            with suppress(InvalidRequestError):
                shown = self._render_parts(messages, documents, options)
        if shown is None:
            if documents:
                messages = with_documents(messages, documents)
            shown = self._render_parts(messages, (), options)
        return with_definitions(shown, definitions) if definitions else shown

    def definition(self, tool: Tool) -> str | None:
        """Return the text by which prompts describe a tool; None if it cannot be distinguished from
        the text around it in the template's output."""
        asked = json.dumps(tool)
        return (
            self._definition(asked)
            if len(asked) <= LONGEST_DEFINITION
            else self._find_definition(asked)
        )

    def _find_definition(self, tool_json: str) -> str | None:
        tool = json.loads(tool_json)
        try:
            once, twice = (
                self._render_parts([_PROBE], (), TemplateOptions(tools=(tool,) * count))
                for count in (1, 2)
            )
        except InvalidRequestError:
            return None
        return repeated_text("".join(map(str, once)), "".join(map(str, twice)))

    def _render_parts(
        self,
        messages: Sequence[ChatMessage[Chunk]],
        documents: Sequence[Document[Chunk]],
        options: TemplateOptions,
    ) -> list[str | Chunk]:
        """Return the prompt's parts with the documents where the template puts them. Raises the
        errors of ``render``, and InvalidRequestError if the template does not show each document
        once."""
        if self._tools_variable is None and needs_tool_section(messages, options.tools):
            messages, options = (
                with_tool_section(messages, options.tools),
                replace(options, tools=()),
            )
        variables = {}
        for name, value in options.variables.items():
            if self.has_variable(name):
                variables[name] = value
        options = replace(options, variables=variables)
        # Templates trim, reorder or quote strings, so chunks pass through them as words.
        word = _unused_word(messages, documents, options)
        parts: list[Chunk | str] = []  # by the number in the word that the template shows for each
        plain: list[dict[str, Any]] = []
        for message in messages:
            content = ""
            for part in message.content:
                if isinstance(part, Chunk):
                    content += f"{word}{len(parts)}z"
                    parts.append(part)
                else:
                    content += part
            speaker = {} if message.name is None else {"name": message.name}
            plain.append({"role": message.role, "content": content, **speaker, **message.fields})
        described: list[dict[str, Any]] = []
        for document in documents:
            described.append({**document.fields, "text": f"{word}{len(parts)}z"})
            parts.append(document.text)
        rendered, *pieces = re.split(
            f"{word}([0-9]+)z", self._render_text(plain, described, options)
        )
        shown: list[str | Chunk] = [rendered]
        numbers = list(map(int, pieces[::2]))
        for number, text in zip(numbers, pieces[1::2], strict=True):
            shown += (parts[number], text)
        if sorted(numbers) != list(range(len(parts))):
            raise InvalidRequestError(
                f"The chat template drops or repeats content: it shows {len(set(numbers))} of"
                f" {len(parts)} context caches, {len(numbers)} times in all. Place them in messages"
                f" that it shows once, or give another template with --chat-template.",
                param="messages",
            )
        return shown

    @cached_property
    def _tools_variable(self) -> str | None:
        """The variable by which the template takes tools; None if it shows none."""
        function = {
            "name": "probe_of_tools",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }
        probe: list[dict[str, Any]] = [{"role": "user", "content": "text"}]
        for name in ("tools", "xml_tools"):
            tools = [{"type": "function", "function": function}]
            with suppress(InvalidRequestError):
                if "probe_of_tools" in self._render_text(
                    probe, [], TemplateOptions(variables={name: tools})
                ):
                    return name
        return None

    def has_variable(self, name: str) -> bool:
        """Return whether the template has a variable of this name that callers may set."""
        return (
            name not in self._reserved
            and re.search(rf"\b{re.escape(name)}\b", self._template or "") is not None
        )

    @cached_property
    def _reserved(self) -> frozenset[str]:
        """The names that are no variables of the template's own."""
        own = inspect.signature(self._tokenizer.apply_chat_template).parameters
        return frozenset({"messages", *own, *self._tokenizer.special_tokens_map})

    def _render_text(
        self,
        messages: list[dict[str, Any]],
        documents: list[dict[str, Any]],
        options: TemplateOptions,
    ) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template. Give one with --chat-template, or ask for a"
                " completion, which needs none.",
                param="messages",
            )
        tools: dict[str, Any] = {}
        if options.tools:
            tools[self._tools_variable or "tools"] = [dict(tool) for tool in options.tools]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                chat_template=self._template,
                documents=documents or None,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt
                and not options.continue_final_message,
                continue_final_message=options.continue_final_message,
                **options.variables,
                **tools,
            )
        except TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The chat template is not valid Jinja: line {error.lineno}: {error}"
            ) from error
        except (
            Exception
        ) as error:  # a template is a program of the model's author, and may raise anything
            raise InvalidRequestError(
                f"The chat template does not accept these messages: {error}", param="messages"
            ) from error
        require_unicode(text, param="messages")
        return text


def _unused_word(
    messages: Sequence[ChatMessage[Chunk]],
    documents: Sequence[Document[Chunk]],
    options: TemplateOptions,
) -> str:
    """Make a word of ASCII letters and digits that none of the texts contains, of the hash of all.
    Raises InvalidRequestError for text that is not valid Unicode."""
    said: list[str] = []
    fields: list[Mapping[str, Any]] = []
    for message in messages:
        fields.append(message.fields)
        said += (message.role, message.name or "")
        for part in message.content:
            if isinstance(part, str):
                said.append(part)
    require_unicode(*said, param="messages")
    beside: list[str] = []
    for document in documents:
        beside.append(repr(document.fields))
        if isinstance(document.text, str):
            beside.append(document.text)
    require_unicode(*beside, param="documents")
    digest = hashlib.sha256()
    for text in (*said, *beside, repr(fields), repr(options)):
        digest.update(text.encode() + b"\n")
    return "chunk" + digest.hexdigest()[:32] + "n"


def needs_tool_section(messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    """Return whether a conversation has tools, calls or results."""
    for message in messages:
        if message.role == "tool" or "tool_calls" in message.fields:
            return True
    return bool(tools)


def with_tool_section(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return the messages with tools described in the system message or, where there is none,
    before the text of the first one of the user's; with calls as text of the assistant's, and
    results as messages of the user's.

    Raises InvalidRequestError (``tools``) where there is neither.
    """
    shown = list(_as_text(messages))
    if not tools:
        return shown
    section = _section(tools)
    roles = [message.role for message in shown]
    if "system" in roles:
        place = roles.index("system")
        content = (*shown[place].content, f"\n\n{section}")
    elif "user" in roles:
        place = roles.index("user")
        content = (f"{section}\n\n", *shown[place].content)
    else:
        raise InvalidRequestError(
            "'tools' need a message of role 'system' or 'user'.", param="tools"
        )
    return [*shown[:place], replace(shown[place], content=content), *shown[place + 1 :]]


def with_documents(
    messages: Sequence[Message], documents: Sequence[Document[Chunk]]
) -> list[Message]:
    """Return the messages with the documents before the text of the first one of the user's: each
    one's title in a line of its own where it has one, its text, and an empty line.

    There they stand still while a conversation grows. Raises InvalidRequestError (``documents``)
    where the user says nothing.
    """
    first = 0
    while first < len(messages) and messages[first].role != "user":
        first += 1
    if first == len(messages):
        raise InvalidRequestError(
            "'documents' need a message of role 'user': add one.", param="documents"
        )
    before: list[str | Chunk] = []
    for document in documents:
        before += document_parts(str(document.fields.get("title") or ""), document.text)
    message = messages[first]
    return [
        *messages[:first],
        replace(message, content=(*before, *message.content)),
        *messages[first + 1 :],
    ]


def document_parts(title: str, text: _Text) -> tuple[str | _Text, ...]:
    """Return the parts of a document in a message: its title in a line of its own unless it is
    empty, its text, and an empty line."""
    return (f"{title}\n", text, _GAP) if title else (text, _GAP)


def _section(tools: Sequence[Tool]) -> str:
    lines = "\n".join(json.dumps(dict(function_of(tool)), ensure_ascii=False) for tool in tools)
    return _INTRODUCTION + lines + _INSTRUCTIONS


def _as_text(messages: Sequence[Message]) -> Iterator[Message]:
    """Yield the messages without fields for tools; results that follow one another share a
    message."""
    for is_result, group in groupby(messages, key=lambda message: message.role == "tool"):
        if is_result:
            results = [
                ("<tool_response>\n", *message.content, "\n</tool_response>") for message in group
            ]
            parts = [
                part
                for index, result in enumerate(results)
                for part in (*(["\n"] if index else []), *result)
            ]
            yield ChatMessage("user", tuple(parts))
            continue
        for message in group:
            fields = dict(message.fields)
            calls = fields.pop("tool_calls", ())
            texts = [_call(call["function"]) for call in calls]
            gap = ("\n",) if texts and any(message.content) else ()
            yield replace(
                message, content=(*message.content, *gap, "\n".join(texts)), fields=fields
            )


def _call(function: Mapping[str, object]) -> str:
    called = json.dumps(
        {"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False
    )
    return f"<tool_call>\n{called}\n</tool_call>"


def repeated_text(once: str, twice: str) -> str | None:
    """Return the text that stands once in ``once`` and twice, one after the other, in ``twice``,
    without the white space around it; None if the two do not differ like that.

    ``once`` is a head, the text and a tail; ``twice`` has a gap and the text again before the tail.
    Where the tail begins as the gap does, several cuts give the same prompts: the leftmost is
    taken.
    """
    added = len(twice) - len(once)
    begin = len(once) - _alike(once[::-1], twice[::-1])
    end = min(_alike(once, twice), begin + added)
    return once[begin:end].strip() or None


def with_definitions(
    parts: Sequence[str | Chunk], definitions: Mapping[str, Chunk]
) -> list[str | Chunk]:
    """Return a prompt's parts with chunks in the places of those ``definitions`` that its texts
    have just once; the others stay text."""
    cut = list(parts)
    for definition in sorted(definitions, key=len, reverse=True):
        places = [
            index for index, part in enumerate(cut) if isinstance(part, str) and definition in part
        ]
        if len(places) == 1:
            before, *behind = str(cut[places[0]]).split(definition)
            if len(behind) == 1:
                cut[places[0] : places[0] + 1] = [before, definitions[definition], *behind]
    return cut


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return bisect_left(
        range(shorter), True, key=lambda index: one[: index + 1] != other[: index + 1]
    )
