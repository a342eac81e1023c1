"""Makes prompts of typed content for all callers: looks up context caches, and those that marked
texts are to have."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    InvalidRequestError,
)
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk
from kvlinker.base.types.context_cache import LinkedCache
from kvlinker.base.types.messages import (
    MARKS,
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    Content,
    ContextCacheReference,
    Document,
    Implicit,
    MarkedText,
    TemplateOptions,
    TokenIds,
)
from kvlinker.base.types.tools import Tool
from kvlinker.linking import Policy
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.marks import marked_text
from kvlinker.prompting.segments import Prompt
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.implicit.ahead import PassagesAhead
from kvlinker.service.implicit.caches import FoundChunk, ImplicitCaches
from kvlinker.service.implicit.recognition import Recognizer
from kvlinker.service.reading.orders import DocumentOrders
from kvlinker.service.reading.passages import PassageLinker

Chunks = Mapping[CachedPart, Chunk]
"""The chunks of parts; a marked text that is not among them stays text."""


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """Holds a prompt, how it is to be linked, and the context caches that stand in it."""

    prompt: Prompt

    policy: Policy
    """The policy that the request asks for, or that applies to a prompt with these chunks."""

    caches: Mapping[str, FoundChunk]
    """By id, in the order in which the prompt first has them."""

    salt: str = ""
    """The request's own salt."""

    reusable: int = 0
    """How many of its tokens stood elsewhere in earlier prompts, where ``implicit = "auto"`` would
    have found them; 0 where texts are looked for."""

    def reusable_of(self, usage: Usage) -> int:
        """Return how many of the prompt's fresh tokens ``implicit = "auto"`` would have found."""
        return min(self.reusable, usage.fresh_tokens)

    @property
    def linked(self) -> tuple[LinkedCache, ...]:
        """The context caches, as answers list them."""
        return tuple(
            LinkedCache(id, len(each.chunk), each.created) for id, each in self.caches.items()
        )

    @property
    def implicit(self) -> bool:
        """True if there are context caches, and none of them was named by id."""
        return bool(self.caches) and all(
            each.cache.implicit_ttl is not None for each in self.caches.values()
        )

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of their chunks."""
        return tuple(each.cache.chunk_key for each in self.caches.values())

    @property
    def ids(self) -> dict[str, str]:
        """The ids of the context caches, by their chunks' content."""
        return {each.chunk.content: id for id, each in self.caches.items()}


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """A request's options for reading its content; None stands for the settings."""

    tenant: str
    policy: Policy | None = None
    implicit: Implicit | None = None

    salt: str = ""
    """The request's own salt: chunks that are found by content, and earlier KV, are of requests
    with the same one."""

    special_tokens: bool = True
    """False to leave out the special tokens around a completion's text."""

    any_order: bool = False
    """True if documents, and neighbouring chunks, may be reordered."""

    keeps: bool = True
    """False if there will be no answer: marked texts become chunks, but no context caches are
    entered."""


class ContentReader:
    """Makes prompts of typed content, with chunks in the places of context caches and of marked
    texts.

    Each prompt takes one look at the catalog for all ids, and one for all texts. Texts that are far
    too long for the model are refused before any of them is encoded. A text for which there is no
    room in the tenant's quota stays text, and so do all where the policy would compute everything
    again anyway. The methods raise ContextCacheNotFoundError and ContextCacheModelError with the
    place of the id as ``param``, and InvalidRequestError.
    """

    def __init__(
        self,
        builder: PromptBuilder,
        caches: ContextCaches,
        implicit: ImplicitCaches,
        recognizer: Recognizer,
        policies: PolicyManager,
        mode: Implicit,
        ahead: PassagesAhead | None = None,
    ) -> None:
        """``mode`` is for requests that do not say which texts become chunks. ``ahead`` makes
        chunks of passages that were seen once; without it, none are."""
        self._builder = builder
        self._caches = caches
        self._implicit = implicit
        self._passages = PassageLinker(caches, implicit, recognizer, ahead)
        self._policies = policies
        self._default_mode = mode
        self._orders = DocumentOrders()

    def chat(
        self,
        messages: Sequence[ChatMessage[CachedPart]],
        how: ReadOptions,
        documents: Sequence[Document[CachedPart]] = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> ReadPrompt:
        """Read a conversation about documents."""
        places: dict[str, str] = {}
        for index, message in enumerate(messages):
            _note_places(message.content, f"messages.{index}.content", places)
        if how.any_order:
            owner = f"{how.tenant}\0{how.salt}"
            documents, messages = self._orders.arranged(owner, documents, messages)
        mode = self._mode(how)
        if mode is Implicit.STRUCTURE:
            documents, messages = _without_marks(documents, messages)
        beside = [document.text for document in documents]
        given = chain(beside, *((message.name or "", *message.content) for message in messages))
        self._builder.limit.check_texts(_texts_of(given), param="messages")
        texts = [json.dumps(tool, ensure_ascii=False, default=str) for tool in options.tools]
        self._builder.limit.check_texts(texts, param="tools")
        options, definitions = self._marked_definitions(options, mode)
        parts = [
            *definitions,
            *beside,
            *chain.from_iterable(message.content for message in messages),
        ]

        def build(chunks: Chunks, with_texts: bool) -> Prompt:
            linked = [
                ChatMessage(each.role, _placed(each.content, chunks), each.name, each.fields)
                for each in messages
            ]
            beside = [
                Document(_chunk_or_text(each.text, chunks), each.fields) for each in documents
            ]
            described = {each.text: chunks[each] for each in definitions if each in chunks}
            return self._builder.chat(
                linked, beside, options=options, definitions=described, with_texts=with_texts
            )

        return self._read(parts, places, how, build)

    def completion(self, prompt: CompletionPrompt[CachedPart], how: ReadOptions) -> ReadPrompt:
        """Read the prompt of a completion."""
        if isinstance(prompt, TokenIds):
            return ReadPrompt(self._builder.completion(prompt.ids), self._policy(how), {}, how.salt)
        places: dict[str, str] = {}
        _note_places(prompt, "prompt", places)
        self._builder.limit.check_texts(_texts_of(prompt), param="prompt")
        if how.any_order:
            prompt = tuple(self._orders.arranged_runs(f"{how.tenant}\0{how.salt}", prompt))
        if self._mode(how) is Implicit.STRUCTURE:
            prompt = tuple(map(_without_mark, prompt))
        return self._read(
            prompt,
            places,
            how,
            lambda chunks, with_texts: self._builder.completion(
                _placed(prompt, chunks),
                special_tokens=how.special_tokens,
                with_texts=with_texts,
            ),
        )

    def _read(
        self,
        parts: Iterable[str | CachedPart],
        places: Mapping[str, str],
        how: ReadOptions,
        build: Callable[[Chunks, bool], Prompt],
    ) -> ReadPrompt:
        """Read a prompt of these parts; ``places`` has the first place of each id, and ``build``
        makes the prompt with these chunks, and its texts if they are wanted.

        Ids are looked up, and marked texts become chunks: each is encoded, its context cache is
        found by content, and once the prompt is built, and fits, new ones are entered. Then parts
        of the prompt's other texts become chunks, which changes none of its token ids.
        """
        cached = list(dict.fromkeys(part for part in parts if not isinstance(part, str)))
        named = self._look_up(places, how.tenant)
        named_chunks: dict[CachedPart, Chunk] = {part: found.chunk for part, found in named.items()}
        mode = self._mode(how)
        encoded: dict[MarkedText, Chunk] = (
            {} if mode is Implicit.OFF else self._encode(cached, how.salt)
        )
        known = self._implicit.find(tuple(encoded.values()), tenant=how.tenant)
        marked = _by_text(encoded, known)
        chunks = named_chunks | encoded | {part: found.chunk for part, found in marked.items()}
        links = self._passages.needs_texts(mode, how.tenant)
        notices = how.keeps and mode in (Implicit.MARKED, Implicit.OFF) and not self._is_exact(how)
        with_texts = links or notices
        try:
            prompt = build(chunks, with_texts)
        except InvalidRequestError:
            if not encoded:
                raise
            # the chat template may not show each text once, which is not the caller's mistake
            encoded, marked, chunks = {}, {}, named_chunks
            prompt = build(chunks, with_texts)
        if how.keeps:
            self._builder.limit.check_prompt(len(prompt))  # before anything is entered for it
            entered = self._implicit.use(
                {chunk: text for text, chunk in encoded.items()}, known, tenant=how.tenant
            )
            marked = _by_text(encoded, entered)
            used = named_chunks | {part: found.chunk for part, found in marked.items()}
            if used != chunks:  # there was no room for some
                prompt = build(used, with_texts)
        uses = {found.chunk: found for found in (*named.values(), *marked.values())}
        if lost := {chunk for chunk, each in uses.items() if self._passages.is_lost_answer(each)}:
            prompt = prompt.with_tokens_of(lost)
        reusable, passages = 0, dict[Chunk, FoundChunk]()
        if notices:
            reusable = self._passages.notice(prompt, tenant=how.tenant, salt=how.salt)
        if links:
            prompt, passages = self._passages.link(
                prompt,
                mode,
                tenant=how.tenant,
                salt=how.salt,
                keeps=how.keeps,
                used=[each.cache.id for each in uses.values()],
            )
        policy = self._policy(how, implicit=bool((marked or passages) and not named))
        uses |= passages
        shown = {uses[chunk].cache.id: uses[chunk] for chunk in prompt.chunks if chunk in uses}
        return ReadPrompt(prompt, policy, shown, how.salt, reusable)

    def _mode(self, how: ReadOptions) -> Implicit:
        """Return which texts become chunks: none where all of it would be computed again."""
        return Implicit.OFF if self._is_exact(how) else how.implicit or self._default_mode

    def _is_exact(self, how: ReadOptions) -> bool:
        """Return whether all of a prompt is computed whatever chunks it has."""
        return how.policy.exact if how.policy else self._policies.needs_no_chunks

    def _policy(self, how: ReadOptions, *, implicit: bool = False) -> Policy:
        """Return the policy of a prompt; ``implicit``: it has chunks, none named by id."""
        return how.policy or self._policies.default_policy(how.tenant, implicit=implicit)

    def _marked_definitions(
        self, options: TemplateOptions, mode: Implicit
    ) -> tuple[TemplateOptions, list[MarkedText]]:
        """Return the options with tools as chat templates take them, and the definitions of those
        that are marked, where marks mean something. Raises InvalidRequestError for a wrong mark."""
        tools: list[Tool] = []
        marked: list[MarkedText] = []
        for index, given in enumerate(options.tools):
            tool = {name: value for name, value in given.items() if name not in MARKS}
            tools.append(tool)
            mark = marked_text(given, "", param=f"tools.{index}")
            if isinstance(mark, MarkedText) and mode in (Implicit.AUTO, Implicit.MARKED):
                definition = self._builder.template.definition(tool)
                if definition is not None:
                    marked.append(replace(mark, text=definition))
        return replace(options, tools=tuple(tools)), marked

    def _encode(self, parts: Iterable[CachedPart], salt: str) -> dict[MarkedText, Chunk]:
        """Return the chunks of those marked texts that can be some."""
        return {
            text: chunk
            for text in parts
            if isinstance(text, MarkedText)
            and (chunk := self._implicit.encode(text.text, salt)) is not None
        }

    def _look_up(self, places: Mapping[str, str], tenant: str) -> dict[CachedPart, FoundChunk]:
        """Return the chunks of the ids, of which those that are implicit live on."""
        try:
            caches = self._caches.usable(places, tenant=tenant) if places else {}
        except (ContextCacheNotFoundError, ContextCacheModelError) as error:
            error.param = places[error.cache_id]
            raise
        self._implicit.extend(dict.fromkeys(caches.values()))
        return {
            ContextCacheReference(id): FoundChunk(cache.chunk, cache, False)
            for id, cache in caches.items()
        }


def _note_places(content: Content[CachedPart], path: str, places: dict[str, str]) -> None:
    """Add the path of each id that is not in ``places`` yet, such as
    ``messages.0.content.1.id``."""
    for index, part in enumerate(content):
        if isinstance(part, ContextCacheReference):
            places.setdefault(part.id, f"{path}.{index}.id")


def _texts_of(parts: Iterable[str | CachedPart]) -> list[str]:
    """Return all texts among the parts, marked or not."""
    return [
        part if isinstance(part, str) else part.text
        for part in parts
        if not isinstance(part, ContextCacheReference)
    ]


def _placed(content: Content[CachedPart], chunks: Chunks) -> Content[Chunk]:
    """Return the content with chunks in the places of context caches and of marked texts."""
    return tuple(_chunk_or_text(part, chunks) for part in content)


def _chunk_or_text(part: str | CachedPart, chunks: Chunks) -> str | Chunk:
    if isinstance(part, MarkedText):
        return chunks.get(part, part.text)
    return part if isinstance(part, str) else chunks[part]


def _by_text(
    encoded: Mapping[MarkedText, Chunk], found: Mapping[Chunk, FoundChunk]
) -> dict[CachedPart, FoundChunk]:
    """Return by text what was found for its chunk."""
    return {text: found[chunk] for text, chunk in encoded.items() if chunk in found}


def _without_marks(
    documents: Sequence[Document[CachedPart]], messages: Sequence[ChatMessage[CachedPart]]
) -> tuple[list[Document[CachedPart]], list[ChatMessage[CachedPart]]]:
    """Return documents and messages with marked texts as any others."""
    return (
        [replace(each, text=_without_mark(each.text)) for each in documents],
        [replace(each, content=tuple(map(_without_mark, each.content))) for each in messages],
    )


def _without_mark(part: str | CachedPart) -> str | CachedPart:
    return part.text if isinstance(part, MarkedText) else part
