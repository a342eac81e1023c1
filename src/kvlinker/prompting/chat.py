"""Renders chat messages through the model's chat template into a prompt's parts, for
``PromptBuilder``."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from kvlinker.base.errors import InvalidRequestError, ModelLoadError
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.messages import ChatMessage, Document, TemplateOptions
from kvlinker.base.types.tools import Tool
from kvlinker.prompting.definitions import repeated_text, with_definitions
from kvlinker.prompting.encoding import require_unicode
from kvlinker.prompting.sections import needs_tool_section, with_documents, with_tool_section

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


DEFAULT_OPTIONS = TemplateOptions()

NO_DEFINITIONS: Mapping[str, Chunk] = MappingProxyType({})

MOST_DEFINITIONS = 512
"""The tools whose definitions' texts are remembered; of more, those that were asked for last."""

LONGEST_DEFINITION = 1 << 14
"""The characters of a tool, as JSON, beyond which the text of its definition is not remembered."""

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
        if documents and self._takes_documents:
            with suppress(InvalidRequestError):
                return with_definitions(self._shown(messages, documents, options), definitions)
        shown = self._shown(
            with_documents(messages, documents) if documents else messages, (), options
        )
        return with_definitions(shown, definitions)

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
                self._shown([_PROBE], (), TemplateOptions(tools=(tool,) * count))
                for count in (1, 2)
            )
        except InvalidRequestError:
            return None
        return repeated_text("".join(map(str, once)), "".join(map(str, twice)))

    @property
    def _takes_documents(self) -> bool:
        return (
            self._template is not None and re.search(r"\bdocuments\b", self._template) is not None
        )

    def _shown(
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
        known = {
            name: value for name, value in options.variables.items() if self.has_variable(name)
        }
        options = replace(options, variables=known)
        pieces = _Pieces(messages, documents, options)
        plain = [_plain(message, pieces) for message in messages]
        described = [
            {**document.fields, "text": pieces.word(document.text)} for document in documents
        ]
        rendered = self._render_text(plain, described, options)
        parts, shown = pieces.cut(rendered)
        if sorted(shown) != list(range(len(pieces))):
            raise InvalidRequestError(
                f"The chat template drops or repeats content: it shows {len(set(shown))} of"
                f" {len(pieces)} context caches, {len(shown)} times in all. Place them in messages"
                f" that it shows once, or give another template with --chat-template.",
                param="messages",
            )
        return parts

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


class _Pieces:
    """Stands in for parts of a prompt with words, which none of its texts contains, and puts them
    back."""

    def __init__(
        self,
        messages: Sequence[ChatMessage[Chunk]],
        documents: Sequence[Document[Chunk]],
        options: TemplateOptions,
    ) -> None:
        """Raises InvalidRequestError for text that is not valid Unicode."""
        texts = [
            text
            for m in messages
            for text in (m.role, m.name or "", *(p for p in m.content if isinstance(p, str)))
        ]
        for text in texts:
            require_unicode(text, param="messages")
        beside = [repr(document.fields) for document in documents]
        beside += [document.text for document in documents if isinstance(document.text, str)]
        for text in beside:
            require_unicode(text, param="documents")
        self._word = _chunk_word(
            [*texts, *beside, repr([message.fields for message in messages]), repr(options)]
        )
        self._parts: list[str | Chunk] = []

    def __len__(self) -> int:
        return len(self._parts)

    def word(self, part: str | Chunk) -> str:
        """Return the word that stands for a part."""
        self._parts.append(part)
        return f"{self._word}{len(self._parts) - 1}z"

    def cut(self, text: str) -> tuple[list[str | Chunk], list[int]]:
        """Return the rendered text with the parts in place of their words, and the numbers of those
        parts in order."""
        pieces = re.split(f"{self._word}([0-9]+)z", text)
        shown = [int(index) for index in pieces[1::2]]
        parts: list[str | Chunk] = [*pieces[:1]]
        for index, between in zip(shown, pieces[2::2], strict=True):
            parts += [self._parts[index], between]
        return parts, shown


def _plain(message: ChatMessage[Chunk], pieces: _Pieces) -> dict[str, Any]:
    """Return the message as templates take it."""
    content = "".join(
        pieces.word(part) if isinstance(part, Chunk) else part for part in message.content
    )
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **name, **message.fields}


def _chunk_word(texts: Sequence[str]) -> str:
    """Make a word of ASCII letters and digits that none of the texts contains: it is made of their
    hash."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\n")
    return "chunk" + digest.hexdigest()[:32] + "n"
