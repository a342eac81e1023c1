"""Renders chat messages through the model's chat template into a prompt's parts, for ``PromptBuilder``."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from jinja2 import TemplateSyntaxError

from kvlinker.errors import InvalidRequestError, ModelLoadError
from kvlinker.prompt.encoding import require_unicode
from kvlinker.types.chunks import Chunk
from kvlinker.types.messages import ChatMessage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class ChatTemplate:
    """Renders messages with a Jinja chat template, whatever that does with their content.

    A template sees a unique word in place of each chunk; the rendered text is cut at these words again. So a template
    may trim, wrap, reorder or refuse what it likes, and the chunk's tokens stay as they are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, chat_template: str | None = None) -> None:
        """Compile ``chat_template``, or else the tokenizer's own. Raises ModelLoadError if it is no valid Jinja."""
        self._tokenizer = tokenizer
        self._template: str | None
        try:
            self._template = tokenizer.get_chat_template(chat_template)
        except ValueError:
            self._template = None
        with suppress(InvalidRequestError):
            self.render([ChatMessage("user", ("text",))])

    @property
    def exists(self) -> bool:
        """True if the model has a chat template."""
        return self._template is not None

    def render(self, messages: Sequence[ChatMessage[Chunk]]) -> list[str | Chunk]:
        """Return the prompt's texts and chunks in order, up to where the assistant's answer begins.

        Raises InvalidRequestError (``messages``) when there is no template, when it raises, or when it does not show
        every chunk exactly once.
        """
        texts = [
            text for m in messages for text in (m.role, m.name or "", *(p for p in m.content if isinstance(p, str)))
        ]
        for text in texts:
            require_unicode(text, param="messages")
        word = _chunk_word(texts)
        chunks: list[Chunk] = []
        plain = []
        for message in messages:
            content = ""
            for part in message.content:
                if isinstance(part, Chunk):
                    content += f"{word}{len(chunks)}z"
                    chunks.append(part)
                else:
                    content += part
            name = {} if message.name is None else {"name": message.name}
            plain.append({"role": message.role, "content": content} | name)
        pieces = re.split(f"{word}([0-9]+)z", self._render_text(plain))
        shown = [int(index) for index in pieces[1::2]]
        if sorted(shown) != list(range(len(chunks))):
            raise InvalidRequestError(
                f"The chat template drops or repeats content: it shows {len(set(shown))} of {len(chunks)} context "
                f"caches, {len(shown)} times in all. Place them in messages that it shows once, or use "
                "/v1/completions.",
                param="messages",
            )
        parts: list[str | Chunk] = [*pieces[:1]]
        for index, text in zip(shown, pieces[2::2], strict=True):
            parts += [chunks[index], text]
        return parts

    def _render_text(self, messages: list[dict[str, str]]) -> str:
        if self._template is None:
            raise InvalidRequestError(
                "This model has no chat template. Use /v1/completions, or configure a chat template.",
                param="messages",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, add_generation_prompt=True
            )
        except TemplateSyntaxError as error:
            raise ModelLoadError(f"The chat template is not valid Jinja: line {error.lineno}: {error}") from error
        except Exception as error:  # a template is a program of the model's author, and may raise anything
            raise InvalidRequestError(
                f"The chat template does not accept these messages: {error}", param="messages"
            ) from error
        return text


def _chunk_word(texts: Sequence[str]) -> str:
    """Make a word of ASCII letters and digits that none of the texts contains: it is made of their hash."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\n")
    return "chunk" + digest.hexdigest()[:32] + "n"
