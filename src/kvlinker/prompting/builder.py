"""Turns messages, prompts and chunk texts into token ids; all text that reaches an engine passes
here."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk, GenerationContext
from kvlinker.base.types.messages import ChatMessage, Document, TemplateOptions
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.chat import DEFAULT_OPTIONS, NO_DEFINITIONS, ChatTemplate
from kvlinker.prompting.encoding import LengthLimit, TextEncoder, require_unicode
from kvlinker.prompting.segments import (
    CachedSegment,
    FreshSegment,
    Prompt,
    PromptText,
    Segment,
    Span,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PromptBuilder:
    """Builds chunks and prompts for one model. Any number of threads may use one.

    ``context`` is the default context of chunks; ``system_prompt`` precedes conversations without a
    system message; ``chat_template`` (Jinja) replaces the tokenizer's own. Texts that cannot have
    fewer than ``max_tokens`` tokens are refused before they are encoded, by ``limit``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        *,
        context: GenerationContext,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        max_tokens: int = sys.maxsize,
    ) -> None:
        """Prepare the encoder and the template. Raises ModelLoadError if the chat template is no
        valid Jinja."""
        self.encoder = TextEncoder(tokenizer)
        self._tokenizer = tokenizer
        self.limit = LengthLimit(self.encoder, max_tokens)
        self.template = ChatTemplate(tokenizer, chat_template)
        self._context = context
        self._system: tuple[ChatMessage[Chunk], ...] = (
            () if system_prompt is None else (ChatMessage("system", (system_prompt,)),)
        )
        self._bos: int | None = tokenizer.bos_token_id

    @cached_property
    def prefix(self) -> tuple[int, ...]:
        """The ids that a conversation has before its first user content: BOS and header, or the
        system prompt's turn.

        Without a chat template, they are those of a completion. They are rendered once: chunks made
        after it stay exact only as long as the template gives the same, so not across days for a
        template that shows the date.
        """
        if self.template.source is None:
            return self.encoder.opening
        slot = Chunk(tokens=())
        parts = self.template.render([*self._system, ChatMessage("user", (slot,))])
        header = parts[: parts.index(slot)]
        return tuple(
            token
            for text in header
            if isinstance(text, str)
            for token in self.encoder.encode_prompt(text)
        )

    @cached_property
    def answer_form(self) -> AnswerForm:
        """The form in which the model writes reasoning and calls of tools."""
        return AnswerForm.of(self._tokenizer, self.template.source)

    def encode_chunk(self, text: str, context: GenerationContext | None = None) -> Chunk:
        """Make the chunk of a text. Special tokens that the text spells are plain text in it.

        Raises InvalidRequestError (``chunks``) for text that is empty or not valid Unicode, and
        ContextLengthError for one that is far too long for the model.
        """
        tokens = self.token_ids(text, param="chunks")
        if not tokens:
            raise InvalidRequestError(
                "A chunk is empty: it needs text that encodes to a token.", param="chunks"
            )
        match context or self._context:
            case GenerationContext.ALONE:
                return Chunk(tokens)
            case GenerationContext.BOS:
                if self._bos is None:
                    raise InvalidRequestError(
                        "The model's tokenizer has no BOS token, so chunks cannot be generated in"
                        " context 'bos'. Use 'alone' or 'prefix'.",
                        param="context",
                    )
                return Chunk((self._bos, *tokens))
            case GenerationContext.PREFIX:
                return Chunk(tokens, prefix=self.prefix)

    def token_ids(self, text: str, *, param: str) -> tuple[int, ...]:
        """Encode a text as a chunk's; an empty one is allowed. Raises the other errors of
        ``encode_chunk``, with ``param`` as the field at fault."""
        require_unicode(text, param=param)
        self.limit.check_texts([text], param=param)
        return self.encoder.encode_data(text, param=param)

    def chunk_within(self, ids: Sequence[int]) -> Chunk:
        """Make the chunk of token ids that stand within a prompt: unlike ``encode_chunk``, BOS is
        never one of them, so that it can take their place."""
        match self._context:
            case GenerationContext.ALONE:
                prefix: tuple[int, ...] = ()
            case GenerationContext.BOS:
                prefix = () if self._bos is None else (self._bos,)
            case GenerationContext.PREFIX:
                prefix = self.prefix
        return Chunk(tuple(ids), prefix=prefix)

    def chat(
        self,
        messages: Sequence[ChatMessage[Chunk]],
        documents: Sequence[Document[Chunk]] = (),
        *,
        options: TemplateOptions = DEFAULT_OPTIONS,
        definitions: Mapping[str, Chunk] = NO_DEFINITIONS,
        with_texts: bool = False,
    ) -> Prompt:
        """Build the prompt of a conversation about documents, up to where the assistant's answer
        begins; ``with_texts``: it has its texts, too.

        Chunks take the places of ``definitions``, texts that the template's ``definition`` gave,
        where each stands in the prompt just once. Messages of text alone give exactly the ids of
        the tokenizer's ``apply_chat_template``. Raises InvalidRequestError (``messages``) for no
        messages, text that is not valid Unicode, and messages that the chat template does not
        accept or not show; ContextLengthError for a prompt that is far too long for the model. A
        template takes time for long texts: check those of requests before, by ``limit``.
        """
        if not messages:
            raise InvalidRequestError(
                "A conversation needs at least one message.", param="messages"
            )
        if self._system and not any(
            message.role in ("system", "developer") for message in messages
        ):
            messages = (*self._system, *messages)
        parts = self.template.render(messages, documents, options=options, definitions=definitions)
        if not with_texts:
            return self._prompt(parts, param="messages")
        said: list[str | Chunk] = [document.text for document in documents]
        for message in messages:
            said += message.content
        described = [self.template.definition(tool) or "" for tool in options.tools]
        return self._prompt(parts, param="messages", said=said, described=described)

    def completion(
        self,
        prompt: str | Sequence[int] | Sequence[str | Chunk],
        *,
        special_tokens: bool = True,
        with_texts: bool = False,
    ) -> Prompt:
        """Build the prompt of a completion. Token ids are taken as they are; texts and chunks stand
        one after the other; ``with_texts``: the prompt has the texts, too.

        Text gets the ``special_tokens`` that the tokenizer adds, such as BOS, once around the whole
        prompt, unless they are not wanted; a first chunk that begins with them gets no second ones.
        Raises InvalidRequestError (``prompt``) for a prompt that is empty, not valid Unicode, or
        has ids outside the vocabulary, and ContextLengthError for one that is far too long for the
        model.
        """
        parts = [prompt] if isinstance(prompt, str) else list(prompt)
        # Before ids are checked one by one: a client may send millions.
        if parts and isinstance(parts[0], int):
            self.limit.check_ids(len(parts), param="prompt")
        texts_and_chunks = [part for part in parts if isinstance(part, str | Chunk)]
        if not texts_and_chunks:
            ids = [part for part in parts if not isinstance(part, str | Chunk)]
            return Prompt((FreshSegment(self.checked_ids(ids, param="prompt")),))
        if len(texts_and_chunks) < len(parts):
            raise InvalidRequestError(
                "A prompt is texts and context caches, or token ids: not both.", param="prompt"
            )
        for part in texts_and_chunks:
            if isinstance(part, str):
                require_unicode(part, param="prompt")
        if not any(texts_and_chunks):
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        return self._prompt(
            texts_and_chunks,
            param="prompt",
            opening=self.encoder.opening if special_tokens else (),
            closing=self.encoder.closing if special_tokens else (),
            said=texts_and_chunks if with_texts else None,
        )

    def _prompt(
        self,
        parts: Sequence[str | Chunk],
        *,
        param: str,
        opening: tuple[int, ...] = (),
        closing: tuple[int, ...] = (),
        said: Sequence[str | Chunk] | None = None,
        described: Sequence[str] = (),
    ) -> Prompt:
        """Join texts and chunks, with special tokens around them, into segments; neighbouring fresh
        tokens share one.

        With ``said``, the contents of messages in their order, the prompt has its texts, in which
        those are found, and the definitions of tools, ``described``. A text that the chat template
        changes is not found, and is a part of the text around it.
        """
        joined = _join_texts(parts)
        self.limit.check_texts([part for part in joined if isinstance(part, str)], param=param)
        first = joined[0] if joined else ""
        # A chunk in context "bos" brings BOS along: models expect one alone.
        if isinstance(first, Chunk) and first.tokens[: len(opening)] == opening:
            opening = ()
        segments: list[Segment] = []
        texts: list[PromptText] = []
        before: list[str] = []
        fresh = list(opening)
        length = len(fresh)
        for index, part in enumerate(joined):
            if isinstance(part, Chunk):
                if fresh:
                    segments.append(FreshSegment(tuple(fresh)))
                segments.append(CachedSegment(part))
                before.append(part.content)
                fresh = []
                length += len(part.tokens)
                continue
            if said is None:
                ids = self.encoder.encode_prompt(part, continued=index > 0)
            else:
                ids, places = self.encoder.encode_prompt_with_places(part, continued=index > 0)
                texts.append(
                    PromptText(
                        part,
                        places,
                        length,
                        messages=_messages_in(part, said),
                        definitions=_definitions_in(part, described) if described else (),
                        before=" ".join(before),
                    )
                )
                before = []
            fresh += ids
            length += len(ids)
        fresh += closing
        if fresh:
            segments.append(FreshSegment(tuple(fresh)))
        if not segments:
            raise InvalidRequestError("The prompt is empty: it encodes to no tokens.", param=param)
        return Prompt(tuple(segments), texts=tuple(texts))

    def checked_ids(self, ids: Sequence[object], *, param: str) -> tuple[int, ...]:
        """Return token ids. Raises InvalidRequestError (``param``) for none, and for any outside
        the vocabulary."""
        if not ids:
            raise InvalidRequestError(
                "There are no token ids: at least one is needed.", param=param
            )
        size = self.encoder.vocab_size
        checked = tuple([token for token in ids if type(token) is int and 0 <= token < size])
        if len(checked) < len(ids):
            wrong = next(token for token in ids if type(token) is not int or not 0 <= token < size)
            raise InvalidRequestError(
                f"Token ids are integers from 0 to {size - 1}, not {wrong!r}.", param=param
            )
        return checked


def _join_texts(parts: Iterable[str | Chunk]) -> list[str | Chunk]:
    """Put neighbouring texts together, and leave out empty texts and chunks."""
    joined: list[str | Chunk] = []
    row: list[str] = []
    for part in parts:
        if isinstance(part, str):
            row.append(part)
        elif part.tokens:
            joined += ("".join(row), part)
            row = []
    joined.append("".join(row))
    return [part for part in joined if part != ""]


def _messages_in(text: str, said: Iterable[str | Chunk]) -> tuple[Span, ...]:
    """Return where texts of messages stand in a text of the prompt, in their order."""
    found: list[Span] = []
    end = 0
    for part in said:
        # Chat templates strip messages.
        if isinstance(part, str) and (quoted := part.strip()):
            begin = text.find(quoted, end)
            if begin >= 0:
                end = begin + len(quoted)
                found.append((begin, end))
    return tuple(found)


def _definitions_in(text: str, described: Iterable[str]) -> tuple[Span, ...]:
    """Return where definitions of tools, which may stand anywhere, stand in a text of the
    prompt."""
    found: list[Span] = []
    for begin, length in sorted((text.find(quoted), len(quoted)) for quoted in described if quoted):
        if begin >= (found[-1][1] if found else 0):
            found.append((begin, begin + length))
    return tuple(found)
