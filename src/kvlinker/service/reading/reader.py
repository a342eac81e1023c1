"""Makes prompts of typed content for all callers: looks up context caches, and those that marked
texts are to have. ``PreparedRequest`` is a request whose prompts are read, and ``RequestTools``
says how answers to it may use tools."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from kvlinker.base.errors import (
    ContextCacheModelError,
    ContextCacheNotFoundError,
    InvalidRequestError,
)
from kvlinker.base.types.answers import Usage
from kvlinker.base.types.chunks import Chunk, LinkedCache, Origin
from kvlinker.base.types.grammars import check_grammar
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
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.base.types.tools import Tool, function_of, shown_tool
from kvlinker.linking import Policy
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.marks import marked_text
from kvlinker.prompting.segments import Prompt
from kvlinker.service.agents.workflows import WorkflowStep
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.content import ToolChoice
from kvlinker.service.context_caches import ContextCaches
from kvlinker.service.context_caches.kept_answers import KeepRequest
from kvlinker.service.implicit.ahead import PassagesAhead
from kvlinker.service.implicit.caches import FoundChunk, ImplicitCaches, Recognizer
from kvlinker.service.reading.passages import PassageLinker

MOST_ORDERS = 8192
"""The most sets of chunks whose orders are remembered; those that were asked for last stay. Chosen
by hand: an entry is a few hundred bytes."""

NO_TEXTS: Mapping[MarkedText, Chunk] = MappingProxyType({})
NO_CHUNKS: Mapping[Chunk, FoundChunk] = MappingProxyType({})

Chunks = Mapping[CachedPart, Chunk]
"""The chunks of parts; a marked text that is not among them stays text."""

P = TypeVar("P", bound=str | CachedPart | Document[CachedPart])


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
        self._recognizer = recognizer
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
        # Errors name the places of ids as the caller wrote them, so before any change of order.
        places: dict[str, str] = {}
        for index, message in enumerate(messages):
            _note_places(message.content, f"messages.{index}.content", places)
        if how.any_order:
            owner = f"{how.tenant}\0{how.salt}"
            documents, messages = self._orders.arranged(owner, documents, messages)
        mode = self._mode(how)
        if mode is Implicit.STRUCTURE:
            documents, messages = _without_marks(documents, messages)
        parts: list[str | CachedPart] = []
        names: list[str] = []
        for document in documents:
            parts.append(document.text)
        for message in messages:
            parts += message.content
            names.append(message.name or "")
        # Encoding, and a template, take long for texts that cannot fit anyway.
        self._builder.limit.check_texts(_texts_of((*names, *parts)), param="messages")
        definitions: list[MarkedText] = []
        if options.tools:
            tools = [json.dumps(tool, ensure_ascii=False, default=str) for tool in options.tools]
            self._builder.limit.check_texts(tools, param="tools")
            options, definitions = self._marked_definitions(options, mode)

        def build(chunks: Chunks, with_texts: bool) -> Prompt:
            shown: list[Document[Chunk]] = []
            linked: list[ChatMessage[Chunk]] = []
            for each in documents:
                (text,) = _place_chunks((each.text,), chunks)
                shown.append(Document(text, each.fields))
            for message in messages:
                content = _place_chunks(message.content, chunks)
                linked.append(ChatMessage(message.role, content, message.name, message.fields))
            described: dict[str, Chunk] = {}
            for definition in definitions:
                if definition in chunks:
                    described[definition.text] = chunks[definition]
            return self._builder.chat(
                linked, shown, options=options, definitions=described, with_texts=with_texts
            )

        return self._read([*definitions, *parts], places, how, mode, build)

    def completion(self, prompt: CompletionPrompt[CachedPart], how: ReadOptions) -> ReadPrompt:
        """Read the prompt of a completion."""
        if isinstance(prompt, TokenIds):
            return ReadPrompt(self._builder.completion(prompt.ids), self._policy(how), {}, how.salt)
        places: dict[str, str] = {}
        _note_places(prompt, "prompt", places)
        self._builder.limit.check_texts(_texts_of(prompt), param="prompt")
        if how.any_order:
            prompt = tuple(self._orders.arranged_runs(f"{how.tenant}\0{how.salt}", prompt))
        mode = self._mode(how)
        if mode is Implicit.STRUCTURE:
            prompt = tuple(map(_without_mark, prompt))
        return self._read(
            prompt,
            places,
            how,
            mode,
            lambda chunks, with_texts: self._builder.completion(
                _place_chunks(prompt, chunks),
                special_tokens=how.special_tokens,
                with_texts=with_texts,
            ),
        )

    def _read(
        self,
        parts: Iterable[str | CachedPart],
        places: Mapping[str, str],
        how: ReadOptions,
        mode: Implicit | None,
        build: Callable[[Chunks, bool], Prompt],
    ) -> ReadPrompt:
        """Read a prompt of these parts; ``places`` has the first place of each id, and ``build``
        makes the prompt with these chunks, and its texts if they are wanted.

        Ids are looked up, marked texts are encoded, and once the prompt is built, and fits, the
        context caches of those are entered. Then passages of the prompt's other texts become
        chunks, which changes none of its token ids.
        """
        links = mode in (Implicit.AUTO, Implicit.STRUCTURE) or (
            mode is Implicit.MARKED and self._recognizer.keeps_answers(how.tenant)
        )
        notices = how.keeps and mode in (Implicit.MARKED, Implicit.OFF)
        with_texts = links or notices
        named = self._look_up(places, how.tenant) if places else {}
        texts: dict[MarkedText, Chunk] = {}
        if mode not in (None, Implicit.OFF):
            texts = self._encode(parts, how.salt)
        known = self._implicit.find(tuple(texts.values()), tenant=how.tenant) if texts else {}
        chunks = _chunks_of(named, texts, known)
        try:
            prompt = build(chunks, with_texts)
        except InvalidRequestError:
            if not texts:
                raise
            # The chat template may not show each text once, which is not the caller's mistake.
            texts, chunks = {}, _chunks_of(named)
            prompt = build(chunks, with_texts)
        uses: dict[CachedPart, FoundChunk]
        if how.keeps:
            # The length is checked before anything is entered for the prompt.
            self._builder.limit.check_prompt(len(prompt))
            uses = named | self._enter(texts, known, how.tenant)
            used = _chunks_of(uses)
            if used != chunks:  # there was no room for some texts
                prompt = build(used, with_texts)
        else:
            uses = named | {text: known[chunk] for text, chunk in texts.items() if chunk in known}
        found: dict[Chunk, FoundChunk] = {}
        lost: set[Chunk] = set()
        for each in uses.values():
            found[each.chunk] = each
            if each.chunk.origin is not Origin.TEXT and self._passages.is_lost_answer(each):
                lost.add(each.chunk)
        prompt = prompt.with_tokens_of(lost) if lost else prompt
        reusable = 0
        if notices:
            # Answers say how many tokens the setting implicit = "auto" would have linked.
            for passage in self._recognizer.notice(prompt.texts, tenant=how.tenant, salt=how.salt):
                first, last = passage.tokens
                reusable += last - first
        if links and mode:
            prompt, passages = self._passages.link(
                prompt,
                mode,
                tenant=how.tenant,
                salt=how.salt,
                keeps=how.keeps,
                used=[each.cache.id for each in found.values()],
            )
            found |= passages
        shown: dict[str, FoundChunk] = {}
        for chunk in prompt.chunks:
            if (use := found.get(chunk)) is not None:
                shown[use.cache.id] = use
        policy = self._policy(how, implicit=bool(found) and not named)
        return ReadPrompt(prompt, policy, shown, how.salt, reusable)

    def _mode(self, how: ReadOptions) -> Implicit | None:
        """Return which texts become chunks; None where all of a prompt is computed whatever chunks
        it has."""
        if how.policy.exact if how.policy else self._policies.needs_no_chunks:
            return None
        return how.implicit or self._default_mode

    def _policy(self, how: ReadOptions, *, implicit: bool = False) -> Policy:
        """Return the policy of a prompt; ``implicit``: it has chunks, none named by id."""
        return how.policy or self._policies.default_policy(how.tenant, implicit=implicit)

    def _marked_definitions(
        self, options: TemplateOptions, mode: Implicit | None
    ) -> tuple[TemplateOptions, list[MarkedText]]:
        """Return the options with tools as chat templates take them, and the definitions of those
        that are marked, where marks mean something. Raises InvalidRequestError for a wrong mark."""
        tools: list[Tool] = []
        marked: list[MarkedText] = []
        for index, defined in enumerate(options.tools):
            tool = {name: value for name, value in defined.items() if name not in MARKS}
            tools.append(tool)
            mark = marked_text(defined, "", param=f"tools.{index}")
            if isinstance(mark, MarkedText) and mode in (Implicit.AUTO, Implicit.MARKED):
                definition = self._builder.template.definition(tool)
                if definition is not None:
                    marked.append(replace(mark, text=definition))
        return replace(options, tools=tuple(tools)), marked

    def _look_up(self, places: Mapping[str, str], tenant: str) -> dict[CachedPart, FoundChunk]:
        """Return the chunks of the ids, of which those that are implicit live on."""
        try:
            caches = self._caches.usable(places, tenant=tenant)
        except (ContextCacheNotFoundError, ContextCacheModelError) as error:
            error.param = places[error.cache_id]
            raise
        self._implicit.extend(dict.fromkeys(caches.values()))
        return {
            ContextCacheReference(id): FoundChunk(cache.chunk, cache, False)
            for id, cache in caches.items()
        }

    def _encode(self, parts: Iterable[str | CachedPart], salt: str) -> dict[MarkedText, Chunk]:
        """Return the chunks of those marked texts that can be some."""
        texts: dict[MarkedText, Chunk] = {}
        for part in parts:
            if isinstance(part, MarkedText) and part not in texts:
                chunk = self._implicit.encode(part.text, salt)
                if chunk is not None:
                    texts[part] = chunk
        return texts

    def _enter(
        self, texts: Mapping[MarkedText, Chunk], known: Mapping[Chunk, FoundChunk], tenant: str
    ) -> dict[CachedPart, FoundChunk]:
        """Return the context caches of the texts: those that are ``known`` live on, and others are
        entered. Texts for which there is no room are left out."""
        if not texts:
            return {}
        wanted = dict(zip(texts.values(), texts, strict=True))
        found = self._implicit.use(wanted, known, tenant=tenant)
        entered: dict[CachedPart, FoundChunk] = {}
        for text, chunk in texts.items():
            if chunk in found:
                entered[text] = found[chunk]
        return entered


class DocumentOrders:
    """Remembers the order in which prompts had the same chunks before, since the linked KV of that
    beginning can be reused. It knows orders by hashes and keeps no text. Methods may be called from
    any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: OrderedDict[bytes, tuple[bytes, ...]] = OrderedDict()  # of names, by the set

    def arranged(
        self,
        owner: str,
        documents: Sequence[Document[CachedPart]],
        messages: Sequence[ChatMessage[CachedPart]],
    ) -> tuple[Sequence[Document[CachedPart]], Sequence[ChatMessage[CachedPart]]]:
        """Return documents, and the runs of chunks in each message, in the order in which a prompt
        of the owner had the same ones before."""
        arranged = partial(self.arranged_runs, owner)
        return arranged(documents), [
            replace(message, content=tuple(arranged(message.content))) for message in messages
        ]

    def arranged_runs(self, owner: str, parts: Sequence[P]) -> Sequence[P]:
        """Return the parts of a content, or documents, where each run of neighbouring chunks is in
        the order in which the owner's prompts had the same ones before."""
        arranged: list[P] = []
        for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
            run = list(group)
            arranged += run if is_text else self._arranged(owner, run)
        return arranged

    def _arranged(self, owner: str, chunks: Sequence[P]) -> Sequence[P]:
        named = {_name(chunk): chunk for chunk in chunks}
        if len(named) < len(chunks) or len(chunks) < 2:
            return chunks
        key = sha256(b"".join([owner.encode(), *sorted(named)])).digest()
        with self._lock:
            order = self._orders.setdefault(key, tuple(named))
            self._orders.move_to_end(key)
            if len(self._orders) > MOST_ORDERS:
                self._orders.popitem(last=False)
        return [named[name] for name in order]


def _name(part: str | CachedPart | Document[CachedPart]) -> bytes:
    """Return a hash of a chunk's text, or of its id."""
    if isinstance(part, Document):
        return sha256(repr(part.fields).encode(errors="surrogatepass") + _name(part.text)).digest()
    says = part if isinstance(part, str) else repr(part)
    if isinstance(part, MarkedText):
        says = part.text
    return sha256(says.encode(errors="surrogatepass")).digest()


def _note_places(content: Content[CachedPart], path: str, places: dict[str, str]) -> None:
    """Add the path of each id that is not in ``places`` yet, such as
    ``messages.0.content.1.id``."""
    for index, part in enumerate(content):
        if isinstance(part, ContextCacheReference):
            places.setdefault(part.id, f"{path}.{index}.id")


def _texts_of(parts: Iterable[str | CachedPart]) -> list[str]:
    """Return all texts among the parts, marked or not."""
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, ContextCacheReference):
            texts.append(part if isinstance(part, str) else part.text)
    return texts


def _chunks_of(
    found: Mapping[CachedPart, FoundChunk],
    texts: Mapping[MarkedText, Chunk] = NO_TEXTS,
    known: Mapping[Chunk, FoundChunk] = NO_CHUNKS,
) -> dict[CachedPart, Chunk]:
    """Return the chunks of the parts that were found, and of texts: those of their context caches
    where these are known."""
    chunks: dict[CachedPart, Chunk] = {}
    for part, each in found.items():
        chunks[part] = each.chunk
    for text, chunk in texts.items():
        chunks[text] = known[chunk].chunk if chunk in known else chunk
    return chunks


def _place_chunks(content: Content[CachedPart], chunks: Chunks) -> Content[Chunk]:
    """Return the content with chunks in the places of context caches and of marked texts."""
    placed: list[str | Chunk] = []
    for part in content:
        if isinstance(part, MarkedText):
            placed.append(chunks.get(part, part.text))
        else:
            placed.append(part if isinstance(part, str) else chunks[part])
    return tuple(placed)


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


class PreparedRequest(NamedTuple):
    """A request whose prompts are read, ready for ``LLM.submit_prepared``."""

    prompts: Mapping[str, ReadPrompt]
    """By the request's fields that they come from, which errors name."""

    sampling: SamplingParams
    tenant: str

    explains: bool = False
    """True if the first choice of each prompt is to explain how it was linked."""

    shows_attention: bool = False
    """True if the explanation is to have the question's attention."""

    keep: KeepRequest | None = None
    """The part of the very first choice that is to be kept."""

    step: WorkflowStep | None = None

    calls: Callable[[], Reader] | None = None
    """Makes readers of the calls that answers may have; None if no tools are offered."""


class RequestTools:
    """Holds the tools of one request, and how its answers may use them."""

    def __init__(
        self,
        form: AnswerForm,
        tail_of: Callable[[Prompt], str],
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        several: bool = True,
        has_form: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """``form`` is the model's. ``tail_of`` decodes the end of a prompt. ``choice`` None is
        "auto". ``several``: an answer may have more than one call, up to ``most_calls``.
        ``has_form``: the request asks for answers of a form of its own, in which only the model's
        marks begin a call. Raises InvalidRequestError for a choice of tools that are not
        offered."""
        self._form = form.without_bare_calls() if has_form else form
        self._tail_of = tail_of
        self._several = several
        self._most_calls = most_calls if several else 1
        self._choice, self._named = ("auto", None) if choice is None else _parse_choice(choice)
        self._offered = () if self._choice == "none" else tuple(tools)
        self.tools = tuple(map(shown_tool, self._offered))
        """The definitions that the prompt shows, with their marks; none where no tool may be
        called."""

        self._is_text = not self._offered and form.reasoning is None
        names = [function_of(tool)["name"] for tool in tools] if tools else []
        if len(set(names)) < len(names):
            raise InvalidRequestError("'tools' has two functions of the same name.", param="tools")
        if choice is not None and self._choice != "none" and not names:
            raise InvalidRequestError(
                f"'tool_choice' is {choice!r}, but there are no 'tools'.", param="tool_choice"
            )
        if self._named is not None and self._named not in names:
            raise InvalidRequestError(
                f"'tool_choice' names {self._named!r}, which is not among the 'tools'.",
                param="tool_choice",
            )

    @property
    def enforces_calls(self) -> bool:
        """True if answers have to call tools: apart from reasoning, they have no text."""
        return bool(self._offered) and self._choice != "auto"

    def reader(self, prompt: Prompt) -> Reader:
        """Return a reader for one answer to ``prompt``."""
        if self._is_text:
            return PlainReader()
        return self._form.reader(
            self._tail_of(prompt),
            self.tools,
            only_calls=self.enforces_calls,
            most_calls=self._most_calls,
        )

    def sampling_fields(self, prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``options``, which are fields of ``SamplingParams``, with those that make answers
        to ``prompt`` call tools as the request demands. Raises InvalidRequestError if ``grammar``
        is none."""
        fields = dict(options)
        if (asked := fields.get("grammar")) is not None:
            check_grammar(asked)
        if self._is_text:
            return fields
        form, tail, several = self._form, self._tail_of(prompt), self._several
        fields["shown_tokens"] = form.shown_tokens
        if self.enforces_calls:
            named = self._named
            called = [tool for tool in self._offered if named in (None, function_of(tool)["name"])]
            fields["grammar"] = form.calls_grammar(
                called, tail=tail, several=several and named is None
            )
            fields["stop"] = fields["stop_token_ids"] = ()  # which end text, and there is none
            return fields
        fields["call_marks"] = form.call_marks(self._offered)
        if grammar := fields.get("grammar"):
            fields["grammar"] = form.framed(
                grammar, tail=tail, tools=self._offered, several=several
            )
        elif self._offered:
            fields["grammar"] = form.free_grammar(self._offered, tail=tail, several=several)
        elif limited := form.reasoning_grammar(tail):
            fields["grammar"] = limited
        return fields


def _parse_choice(choice: Any) -> tuple[str, str | None]:
    """Return the word of a choice of tools, "named" where it names one, and that name."""
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
    raise InvalidRequestError(
        f"'tool_choice' is {choice!r}, but must be 'none', 'auto', 'required', or a tool, such as "
        "{'type': 'function', 'function': {'name': 'get_weather'}}.",
        param="tool_choice",
    )
