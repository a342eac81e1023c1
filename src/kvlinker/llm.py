"""The Python API: one model with its engine, store and catalog; the server and the command line use
it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Self,
    TypeGuard,
    TypeVar,
    Unpack,
    cast,
    get_args,
    overload,
)

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvlinker.base.errors import (
    InvalidRequestError,
    StoreError,
    UnknownArgumentError,
    did_you_mean,
)
from kvlinker.base.loading import Report, unreported
from kvlinker.base.types.answers import PromptLogprobs
from kvlinker.base.types.chunks import GenerationContext, parse_context, salt_of
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    Document,
    Implicit,
    TemplateOptions,
)
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT, Scope, parse_scope
from kvlinker.base.types.texts import CacheContent, Piece, SearchHit
from kvlinker.base.types.tools import Tool
from kvlinker.engines.contract.contract import EngineLoad, GenerationRequest, RequestHandle, Sink
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking import Explanation, Policy, as_policy, describe_policies
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.segments import Prompt
from kvlinker.prompting.splitting import split_text
from kvlinker.service.agents.workflows import WorkflowStep
from kvlinker.service.answer import Answer, AnswerBuilder, AnswerStream, ChoiceSink
from kvlinker.service.content import (
    ChatOptions,
    CompletionContent,
    ContentPart,
    Documents,
    Message,
    Messages,
    Order,
    ToolChoice,
    parse_documents,
    parse_implicit,
    parse_messages,
    parse_prompt,
    parse_tools,
    refuse_tools_in_text,
)
from kvlinker.service.context_caches.caches import CachesUsage
from kvlinker.service.context_caches.checks import (
    check_limit,
    check_order,
    check_pairs,
    check_query,
    expiry_of,
    id_of,
    texts_of,
)
from kvlinker.service.context_caches.creation import Metadata
from kvlinker.service.context_caches.kept_answers import KeepRequest
from kvlinker.service.embedding import EmbeddingInput, embedder_of
from kvlinker.service.reading import ReadOptions, ReadPrompt
from kvlinker.service.reading.reader import PreparedRequest, RequestTools
from kvlinker.service.startup import EmbeddedSource, EngineSource, Parts, engine_source
from kvlinker.settings import AUTO, Options, Settings, load_settings
from kvlinker.store import UNCHANGED, ContextCache, Page, TierUsage, Unchanged

if TYPE_CHECKING:
    from kvlinker.service.builders import BuilderClient

__all__ = [
    "LLM",
    "Answer",
    "ChoiceSink",
    "ContentPart",
    "Explanation",
    "Message",
    "Prompt",
    "ReadPrompt",
]

K = TypeVar("K")


def _tenant_of(cache: ContextCache | str, tenant: str | None) -> str:
    """Return the tenant that a call about a context cache is for: the one that is named, else the
    owner of a private one that is given as it was returned, else the default tenant, who may use
    shared ones."""
    if tenant is not None:
        return tenant
    return (
        cache.tenant
        if isinstance(cache, ContextCache) and cache.scope is Scope.PRIVATE
        else DEFAULT_TENANT
    )


@contextmanager
def progress_bar(chunks: int, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr, or in a notebook's cell, until the block ends. The block calls the
    yielded function for each of the ``chunks``, from any thread. ``shown``: None for notebooks
    alone."""
    console = Console(stderr=True)
    if not (console.is_jupyter if shown is None else shown):
        yield lambda: None
        return
    columns = (TextColumn("caching chunks"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=chunks)
        yield lambda: bar.advance(task)


TAIL_TOKENS = 1024
"""The most tokens of a prompt's end that are decoded to find out how an answer begins."""

PREFILL_TOKENS = 1024
"""The length of the prompt whose rate ``LLM.prefill_rate`` returns."""

FINGERPRINT_CHARACTERS = 12
"""The characters of the model's fingerprint that answers have."""


class LLM(Parts):
    """A model that answers prompts made of cached chunks and fresh text.

    ``model``: local path or hub id; without it the small model that ships with kvlinker.
    ``options`` are the fields of ``Settings``, such as ``policy="legolink-16"`` or
    ``state_dir="/data/kvlinker"``. All methods may be called from any thread.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[Options]) -> None:
        settings = load_settings(model=str(model) if model is not None else None, **options)
        self._start(engine_source(settings), settings)

    @classmethod
    def from_settings(
        cls,
        settings: Settings,
        *,
        builders: BuilderClient | None = None,
        report: Report = unreported,
    ) -> Self:
        """Load ``settings.model`` and start. ``builders``, whom servers ask for chunks that they
        lack, are closed with it. ``report`` takes the progress."""
        return cls.from_source(engine_source(settings, builders, report), settings)

    @classmethod
    def from_model(
        cls, loaded: LoadedModel, settings: Settings, *, builders: BuilderClient | None = None
    ) -> Self:
        """Start on a model that is in memory already, such as one of
        ``model_loading.prepare_model``."""
        return cls.from_source(EmbeddedSource(loaded, builders), settings)

    @classmethod
    def from_source(cls, source: EngineSource, settings: Settings) -> Self:
        """Start on the engine that ``source`` makes."""
        llm = cls.__new__(cls)
        llm._start(source, settings)
        return llm

    def generate_context_cache(
        self,
        chunks: str | Sequence[str],
        *,
        ttl: float | None = None,
        name: str | None = None,
        metadata: Metadata | None = None,
        context: GenerationContext | str | None = None,
        pinned: bool = False,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
        progress: bool | None = None,
    ) -> tuple[ContextCache, ...]:
        """Compute and keep the KV of each chunk; the results stand in message content. A string is
        one chunk.

        ``ttl`` is in seconds. ``metadata``: pairs of strings for all, or a list of them, one for
        each. ``pinned``: the KV is not evicted. ``scope``: "shared" lets all tenants use it.
        ``progress`` shows a bar; None: in notebooks. Raises QuotaExceededError and PinLimitError if
        the settings, or the store, have no room for it.
        """
        texts = texts_of(chunks)
        with progress_bar(len(texts), progress) as advance:
            return self.begin_context_caches(
                texts,
                ttl=ttl,
                name=name,
                metadata=metadata,
                context=context,
                pinned=pinned,
                scope=scope,
                tenant=tenant,
                advance=advance,
            ).result()

    def begin_context_caches(
        self,
        texts: Sequence[str],
        *,
        ttl: float | None,
        name: str | None,
        metadata: Metadata | None,
        context: GenerationContext | str | None,
        pinned: bool,
        scope: Scope | str,
        tenant: str,
        advance: Callable[[], object],
    ) -> Future[tuple[ContextCache, ...]]:
        """Begin what ``generate_context_cache`` returns; ``advance`` is called as the KV of each
        text comes, from any thread. It cannot be cancelled."""
        return self.caches.create(
            texts,
            tenant=tenant,
            ttl=ttl,
            name=name,
            metadata=metadata,
            context=None if context is None else parse_context(context),
            pinned=pinned,
            scope=parse_scope(scope),
            admin=True,
            advance=advance,
        )

    def expire_cache(self, cache: ContextCache | str, *, tenant: str | None = None) -> None:
        """Delete a context cache; its KV goes when no other holds it. ``tenant``: by default the
        owner of the ``ContextCache`` that is given. Raises ContextCacheNotFoundError."""
        self.caches.delete(id_of(cache), tenant=_tenant_of(cache, tenant), admin=True)

    def expire_caches(
        self,
        metadata: Mapping[str, str],
        *,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> int:
        """Delete all context caches that have all these pairs of metadata; returns how many."""
        check_pairs(metadata)
        return self.caches.delete_matching(
            metadata, tenant=tenant, scope=parse_scope(scope), admin=True
        )

    def update_cache(
        self,
        cache: ContextCache | str,
        *,
        ttl: float | Unchanged | None = UNCHANGED,
        name: str | Unchanged | None = UNCHANGED,
        metadata: Mapping[str, str] | Unchanged = UNCHANGED,
        pinned: bool | Unchanged = UNCHANGED,
        tenant: str | None = None,
    ) -> ContextCache:
        """Change the given fields. ``ttl`` counts seconds from now; None: it lives until it is
        deleted. ``pinned``: its KV is not evicted. ``tenant``: as in ``expire_cache``. Raises
        ContextCacheNotFoundError and PinLimitError."""
        return self.caches.update(
            id_of(cache),
            tenant=_tenant_of(cache, tenant),
            expires_at=ttl if ttl is None or isinstance(ttl, Unchanged) else expiry_of(ttl),
            name=name,
            metadata=metadata,
            pinned=pinned,
            admin=True,
        )

    def list_caches(
        self,
        *,
        limit: int = 20,
        after: ContextCache | str | None = None,
        order: Literal["asc", "desc"] = "desc",
        metadata: Mapping[str, str] | None = None,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> Page:
        """List at most ``limit`` context caches by time of creation, after ``after``; ``has_more``
        is true if there are others.

        Only those with all pairs of ``metadata``. ``scope``: the tenant's own, or the shared ones.
        """
        check_limit(limit)
        check_order(order)
        check_pairs(metadata or {})
        after_id = None if after is None else id_of(after)
        return self.caches.list(
            tenant=tenant,
            limit=limit,
            after=after_id,
            order=order,
            metadata=metadata,
            scope=parse_scope(scope),
        )

    def read_cache(self, cache: ContextCache | str, *, tenant: str | None = None) -> CacheContent:
        """Read a context cache's text and token ids. ``tenant``: as in ``expire_cache``. Raises
        ContextCacheNotFoundError."""
        return self.caches.content(id_of(cache), tenant=_tenant_of(cache, tenant))

    def search(
        self,
        query: str,
        *,
        limit: int = 10,
        metadata: Mapping[str, str] | None = None,
        scope: Scope | str = Scope.PRIVATE,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[SearchHit, ...]:
        """Find context caches by words of their texts, and with an embedding model also by their
        meaning, the best match first; the hits stand in message content.

        Only those with all pairs of ``metadata``. Nothing in the query is syntax. Raises
        InvalidRequestError for a query without words, and where the settings have search off.
        """
        check_query(query)
        check_limit(limit)
        check_pairs(metadata or {})
        return self.caches.search(
            query, tenant=tenant, limit=limit, metadata=metadata, scope=parse_scope(scope)
        )

    def caches_usage(
        self, *, scope: Scope | str = Scope.PRIVATE, tenant: str = DEFAULT_TENANT
    ) -> CachesUsage:
        """Return the number of context caches, the size of their KV, and the quota."""
        return self.caches.usage(tenant=tenant, scope=parse_scope(scope))

    def score(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        tenant: str = DEFAULT_TENANT,
        logprobs: int | None = None,
    ) -> PromptLogprobs:
        """Return the log probabilities of a prompt's last tokens: of all after its last context
        cache, except the first one.

        ``prompt`` is one of ``completion``; nothing is generated. ``logprobs``: how many of the
        most likely tokens to return with each. Raises the errors of ``completion``, and
        InvalidRequestError if there is nothing to score.
        """
        scoring = self.begin_score(prompt, policy=policy, tenant=tenant, logprobs=logprobs)
        return scoring.result()

    def begin_score(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        tenant: str = DEFAULT_TENANT,
        logprobs: int | None = None,
    ) -> Future[PromptLogprobs]:
        """Begin what ``score`` returns."""
        read = self.read_completion(prompt, policy=policy, tenant=tenant)
        request = GenerationRequest(
            read.prompt, read.policy, SamplingParams(logprobs=logprobs), tenant
        )
        return self.engine.score(request)

    def explain(
        self,
        messages: Messages | None = None,
        *,
        documents: Documents = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        prompt: CompletionContent | CompletionPrompt[CachedPart] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        attention: bool = False,
        tenant: str = DEFAULT_TENANT,
    ) -> Explanation:
        """Explain how a conversation, or a completion's ``prompt``, is linked: tokens, segments,
        recomputed tokens by layer, the scores that chose them, and the cost. Nothing is generated,
        and nothing is reused from earlier requests.

        ``attention``: also return the last token's attention in each layer. Raises the errors of
        ``chat_completion``.
        """
        explaining, read = self.begin_explain(
            messages,
            documents=documents,
            options=options,
            prompt=prompt,
            policy=policy,
            implicit=implicit,
            attention=attention,
            tenant=tenant,
        )
        return self.described(explaining.result(), read)

    def begin_explain(
        self,
        messages: Messages | None = None,
        *,
        documents: Documents = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        prompt: CompletionContent | CompletionPrompt[CachedPart] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        attention: bool = False,
        tenant: str = DEFAULT_TENANT,
    ) -> tuple[Future[Explanation], ReadPrompt]:
        """Begin what ``explain`` returns: the explanation to come, and the prompt with which
        ``described`` completes it. Cancelling the future ends the computation."""
        if (messages is None) == (prompt is None):
            raise InvalidRequestError("Give either 'messages' or 'prompt'.", param="messages")
        if messages is not None:
            read = self.read_chat(
                messages,
                documents=documents,
                options=options,
                policy=policy,
                implicit=implicit,
                tenant=tenant,
            )
        else:
            read = self.read_completion(
                prompt or "", policy=policy, implicit=implicit, tenant=tenant
            )
        request = GenerationRequest(
            read.prompt, read.policy, SamplingParams(), tenant, shows_attention=attention
        )
        return self.engine.explain(request), read

    def described(self, explanation: Explanation, read: ReadPrompt) -> Explanation:
        """Add the ids of context caches, and the text of each token, to an explanation of a
        prompt."""
        texts = self.builder.encoder.token_texts(explanation.token_ids)
        return explanation.with_context_caches(read.ids).with_texts(texts)

    def chat_prompt(
        self,
        messages: Messages | Prompt,
        *,
        options: TemplateOptions = DEFAULT_OPTIONS,
        tenant: str = DEFAULT_TENANT,
    ) -> Prompt:
        """Build the prompt of a conversation; a prompt stays as it is. Raises the errors of
        ``read_chat``."""
        return self.read_chat(messages, options=options, tenant=tenant).prompt

    @overload
    def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> Answer: ...

    @overload
    def chat_completion(
        self, messages: Messages | Prompt, *, stream: Literal[True], **options: Unpack[ChatOptions]
    ) -> Iterator[str]: ...

    def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        stream: bool = False,
        **options: Unpack[ChatOptions],
    ) -> Answer | Iterator[str]:
        """Answer a conversation whose content mixes text and context caches, in any order, or a
        prompt made of one. Calls and reasoning are separate from the answer's text.

        With ``stream``, return an iterator over the answer's text, which comes in pieces as it is
        generated; dropping it cancels the request. Raises InvalidRequestError, also for a form or a
        schema that cannot be enforced, and for ``stream`` with tools, whose calls are no text.
        """
        if not stream:
            return self.stream(messages, **options).answer
        refuse_tools_in_text(options)
        return self.stream(messages, **options).texts()

    def stream(self, messages: Messages | Prompt, **options: Unpack[ChatOptions]) -> AnswerStream:
        """Answer as ``chat_completion`` does; yields the answer as it is generated: text, reasoning
        and calls. ``answer`` of the stream is the whole at the end."""
        asked, builder = self.prepare_chat(messages, options)
        return AnswerStream(lambda sink: self.submit_prepared(asked, sink), builder)

    def prepare_chat(
        self, messages: Messages | Prompt, options: ChatOptions
    ) -> tuple[PreparedRequest, AnswerBuilder]:
        """Prepare the request of a call of ``chat_completion``, and the builder of its answer.
        Raises the errors of that."""
        _refuse_unknown(options, ChatOptions)
        known = SamplingFields.__annotations__
        given = {name: value for name, value in options.items() if name in known}
        response_format = options.get("response_format")
        if response_format is not None and (form := AnswerGrammar.response_format(response_format)):
            if given.get("grammar") is not None:
                raise InvalidRequestError(
                    "'response_format' and 'grammar' both ask for a form: give one of them.",
                    param="response_format",
                )
            given["grammar"] = form
        tools = self.request_tools(
            parse_tools(options.get("tools", ())),
            options.get("tool_choice"),
            several=options.get("parallel_tool_calls", True),
            has_form=given.get("grammar") is not None,
        )
        tenant = options.get("tenant", DEFAULT_TENANT)
        read = self.read_chat(
            messages,
            documents=options.get("documents", ()),
            options=TemplateOptions(tools=tools.tools),
            policy=options.get("policy"),
            implicit=options.get("implicit"),
            order=options.get("order") or "given",
            tenant=tenant,
        )
        reader = partial(tools.reader, read.prompt)
        asked = PreparedRequest(
            {"messages": read},
            self.sampling_params(**tools.sampling_fields(read.prompt, given)),
            tenant,
            explains=options.get("explain", False),
            keep=KeepRequest.of(
                options.get("keep") or self.settings.keep_answers, options.get("ttl"), reader
            ),
            step=WorkflowStep.of(options.get("workflow"), options.get("next")),
            calls=reader if tools.tools else None,
        )

        def complete(answer: Answer) -> Answer:
            explanation = answer.explanation and self.described(answer.explanation, read)
            return replace(answer, explanation=explanation, context_caches=read.linked)

        return asked, AnswerBuilder(reader(), complete)

    def completion(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        **sampling: Unpack[SamplingFields],
    ) -> Answer:
        """Continue a text, token ids, or a list of texts and context caches; no chat template."""
        asked, builder = self.prepare_completion(
            prompt, sampling, policy=policy, implicit=implicit, tenant=tenant
        )
        return AnswerStream(lambda sink: self.submit_prepared(asked, sink), builder).answer

    def prepare_completion(
        self,
        prompt: CompletionContent,
        sampling: SamplingFields,
        *,
        policy: str | Policy | None,
        implicit: Implicit | str | None,
        tenant: str,
    ) -> tuple[PreparedRequest, AnswerBuilder]:
        """Prepare the request of a call of ``completion``, and the builder of its answer."""
        _refuse_unknown(sampling, SamplingFields)
        read = self.read_completion(prompt, policy=policy, implicit=implicit, tenant=tenant)
        asked = PreparedRequest({"prompt": read}, self.sampling_params(**sampling), tenant)
        return asked, AnswerBuilder(
            complete=lambda answer: replace(answer, context_caches=read.linked)
        )

    def submit(
        self,
        read: ReadPrompt,
        sampling: SamplingParams,
        sink: ChoiceSink,
        *,
        n: int = 1,
        tenant: str = DEFAULT_TENANT,
    ) -> RequestHandle:
        """Queue ``n`` choices for one prompt, the result of ``read_chat`` or ``read_completion``;
        see ``submit_prepared``."""
        return self.submit_prepared(PreparedRequest({"prompt": read}, sampling, tenant), sink, n=n)

    def read_chat(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents = (),
        options: TemplateOptions = DEFAULT_OPTIONS,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        keeps: bool = True,
        salt: str | None = None,
        order: Order = "given",
        tenant: str = DEFAULT_TENANT,
    ) -> ReadPrompt:
        """Build the prompt of a conversation about documents, and choose its policy; a prompt stays
        as it is.

        Texts that become chunks get context caches, unless ``keeps`` is False. With a ``salt``,
        only KV of requests with the same one is reused, and context caches that are named by id. In
        ``order`` "any", documents and neighbouring chunks may change places. Raises
        InvalidRequestError, PolicyError for one that is unknown or lacks its certificate, and
        ContextCacheNotFoundError whose ``param`` is the place of the id.
        """
        how = self._read_options(policy, implicit, keeps, tenant, salt, order)
        if isinstance(messages, Prompt):
            policy = how.policy or self.policy_manager.default_policy(tenant)
            return ReadPrompt(messages, policy, {}, how.salt)
        # The server's routes have parsed both before.
        typed = messages if _are_all(messages, ChatMessage) else parse_messages(messages)
        known = documents if _are_all(documents, Document) else parse_documents(documents)
        return self._reader.chat(typed, how, known, options)

    def read_completion(
        self,
        prompt: CompletionContent | CompletionPrompt[CachedPart],
        *,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        keeps: bool = True,
        special_tokens: bool = True,
        salt: str | None = None,
        order: Order = "given",
        tenant: str = DEFAULT_TENANT,
    ) -> ReadPrompt:
        """Build the prompt of a completion, with or without the ``special_tokens`` that the
        tokenizer adds, and choose its policy. Raises the errors of ``read_chat``."""
        how = self._read_options(policy, implicit, keeps, tenant, salt, order)
        how = replace(how, special_tokens=special_tokens)
        return self._reader.completion(parse_prompt(prompt), how)

    def request_tools(
        self,
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        several: bool = True,
        has_form: bool = False,
        most_reasoning: int | None = None,
    ) -> RequestTools:
        """Return how the answers to a conversation may use ``tools``. With ``several``, an answer
        may have more than one call; with ``has_form``, the request asks for answers of a form of
        its own; ``most_reasoning`` limits the tokens of reasoning. Raises InvalidRequestError for a
        choice of tools that are not offered."""
        form = self.answer_form
        if most_reasoning is not None:
            form = form.limited(most_reasoning)
        return RequestTools(
            form,
            self.tail_of,
            tools,
            choice,
            several=several,
            has_form=has_form,
            most_calls=self.settings.max_calls,
        )

    @cached_property
    def answer_form(self) -> AnswerForm:
        """The form in which the model writes reasoning and calls of tools."""
        return self.builder.answer_form

    def tail_of(self, prompt: Prompt) -> str:
        """Decode the end of a prompt, after its last context cache, with special tokens."""
        begin = max((span.end for span in prompt.spans), default=0)
        tokens = prompt.tokens[max(begin, len(prompt) - TAIL_TOKENS) :]
        text: str = self.tokenizer.decode(tokens.tolist())
        return text

    def sampling_params(self, **fields: Any) -> SamplingParams:
        """Return sampling parameters: ``fields``, those that the model's
        ``generation_config.json`` recommends, and the usual defaults, in this order. Raises
        InvalidRequestError."""
        return SamplingParams(**{**self.sampling_defaults, **fields})

    def fitting(self, sampling: SamplingParams, prompt: Prompt) -> SamplingParams:
        """Return sampling parameters whose ``max_tokens``, where they have any, is cut to the room
        of the window after the prompt, and to the settings' limit of answers."""
        if sampling.max_tokens is None:
            return sampling
        room = max(1, self.engine.max_model_len - len(prompt))
        most = self.settings.max_answer_tokens
        fitting = min(sampling.max_tokens, room if most is None else min(most, room))
        return sampling if fitting == sampling.max_tokens else replace(sampling, max_tokens=fitting)

    def submit_prepared(
        self, asked: PreparedRequest, sink: Sink, *, number: int = 0, n: int = 1
    ) -> RequestHandle:
        """Queue ``n`` choices for the prompt of this ``number`` among the request's, under its
        policy, and return at once; events come from the engine's thread.

        With a seed, choice i uses seed + i. When one choice cannot be queued, none is. The handle
        cancels all. The first choice's ``Finished`` has the explanation that the request asks for,
        and the context cache that it has become. Raises the errors of ``Engine.generate``, and
        InvalidRequestError if a context cache that the workflow uses next does not exist.
        """
        read, tenant = list(asked.prompts.values())[number], asked.tenant
        keep = None if number else asked.keep
        bad_words: list[tuple[int, ...]] = []
        for word in asked.sampling.bad_words:
            bad_words += self.builder.encoder.encode_word(word)
        request = GenerationRequest(
            read.prompt,
            read.policy,
            asked.sampling,
            tenant,
            n,
            salt=read.salt,
            bad_words=tuple(bad_words),
            explains=asked.explains,
            shows_attention=asked.shows_attention,
            keeps_answer=keep is not None,
            calls=asked.calls,
            workflow=asked.step.name if asked.step else None,
        )
        step = asked.step
        # Before the request is queued: an unknown id in its step refuses it.
        if step is not None:
            expected = self.agents.workflows.expected(step, tenant=tenant)
            sink = self.agents.workflows.watch(sink)
        if keep is not None:
            sink = self._keeper.watch(sink, keep, tenant=tenant, salt=read.salt)
        if asked.calls is not None and self.settings.tool_wait:
            sink = self.agents.tool_waits.watch(request, sink, asked.calls)
        if (auditor := self.policy_manager.auditor) is not None:
            request, sink = auditor.watch(request, sink, implicit=read.implicit)
        handle = self.engine.generate(request, sink)
        if step is not None:
            self.agents.workflows.begin(step, expected, read.keys, tenant=tenant)
        return handle

    def _read_options(
        self,
        policy: str | Policy | None,
        implicit: Implicit | str | None,
        keeps: bool,
        tenant: str,
        salt: str | None,
        order: Order,
    ) -> ReadOptions:
        """Parse how content is to be read. Raises InvalidRequestError, and PolicyError for a policy
        that is unknown or lacks its certificate."""
        if order not in get_args(Order):
            raise InvalidRequestError(
                f"'order' is {order!r}, but must be 'given' or 'any'.", param="order"
            )
        named = None if policy in (None, AUTO) else as_policy(policy)
        if named is not None:
            self.policy_manager.check(named)
        return ReadOptions(
            tenant,
            named,
            None if implicit is None else parse_implicit(implicit),
            salt_of(salt),
            any_order=order == "any",
            keeps=keeps,
        )

    @cached_property
    def system_fingerprint(self) -> str:
        """A name for the source of the server's answers: kvlinker's version, and the beginning of
        the model's fingerprint."""
        return f"kvlinker-{version('kvlinker')}-{self.engine.fingerprint[:FINGERPRINT_CHARACTERS]}"

    @property
    def max_model_len(self) -> int:
        """The most tokens that prompt and answer may have together."""
        return self.engine.max_model_len

    @property
    def healthy(self) -> bool:
        """False once the engine was closed or has failed for good."""
        return self.engine.healthy

    def current_load(self) -> EngineLoad:
        """Return the engine's load."""
        return self.engine.current_load()

    def prefill_rate(self) -> float | None:
        """Return the tokens per second of a prompt of ``PREFILL_TOKENS``; None if nothing was
        computed yet."""
        seconds = self.engine.prefill_seconds(PREFILL_TOKENS)
        return PREFILL_TOKENS / seconds if seconds else None

    def tiers(self) -> tuple[TierUsage, ...]:
        """Return the fill level of each tier of the store, from the fastest to the slowest; a
        remote one may answer slowly."""
        return self.store.usage()

    def bandwidths(self) -> dict[str, float]:
        """Return the bytes per second that tiers deliver, by name, for those that were measured."""
        return self.store.bandwidths.known()

    def spilled_bytes(self) -> int:
        """Return the bytes of prefixes that the engine keeps on disk, in addition to those of
        chunks."""
        return self.store.spilled_bytes

    def held_bytes(self) -> int:
        """Return the bytes of the chunks that requests hold in memory until they end."""
        return self.store.held_bytes

    def default_policy(self, tenant: str = DEFAULT_TENANT) -> Policy:
        """Return the policy of the tenant's requests that name none: the settings', or the one that
        keeps their quality target."""
        return self.policy_manager.default_policy(tenant)

    def policies(self) -> tuple[dict[str, Any], ...]:
        """Describe all linking policies, sorted by name, as JSON, and which ones this engine
        supports."""
        return describe_policies(self.engine.unsupported)

    def split(
        self, text: str, *, method: str = "passage", max_tokens: int = 512
    ) -> tuple[str, ...]:
        """Cut a text into chunks (EPIC's KVSplit); joined, they are the text again."""
        return tuple(
            piece.text for piece in self.split_pieces(text, method=method, max_tokens=max_tokens)
        )

    def split_pieces(
        self,
        text: str,
        *,
        method: str = "passage",
        max_tokens: int = 512,
        most_pieces: int | None = None,
    ) -> tuple[Piece, ...]:
        """Cut a text into chunks as ``split`` does, with the beginning of each and the number of
        its tokens. Raises InvalidRequestError for one that makes more than ``most_pieces``."""
        if not isinstance(text, str):
            raise InvalidRequestError(f"'text' is {text!r}, but must be a text.", param="text")
        return split_text(
            text,
            tokenizer=self.builder.encoder,
            method=method,
            max_tokens=max_tokens,
            most_pieces=most_pieces,
        )

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Encode a text as a chunk's: no special tokens are added, and those that it spells are
        plain text.

        Raises InvalidRequestError if the tokenizer cannot write such a text, and ContextLengthError
        for one that is far too long for the model.
        """
        return self.builder.token_ids(text, param="text")

    def embed(
        self, texts: EmbeddingInput | Sequence[EmbeddingInput], *, dimensions: int | None = None
    ) -> NDArray[np.float32]:
        """Return the vectors [texts, dimensions] of texts, or of token ids of the embedding model,
        each of length 1: all dimensions, or the first ones. A text alone is one of a list.

        Raises ModelNotFoundError without the setting ``embedding_model``, and InvalidRequestError.
        """
        alone = isinstance(texts, str) or (len(texts) > 0 and isinstance(texts[0], int))
        inputs = cast(Sequence[EmbeddingInput], [texts] if alone else texts)
        return embedder_of(self.embedder).embed(inputs, dimensions=dimensions)

    def token_text(self, token_id: int) -> str:
        """Decode a token alone."""
        text: str = self.tokenizer.decode([token_id])
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token alone, which may be a part of a character's."""
        return self.builder.encoder.token_bytes(token_id)

    def decode_ids(self, token_ids: Sequence[int]) -> str:
        """Decode token ids, special tokens included. Raises InvalidRequestError (``tokens``) for
        ids outside the vocabulary."""
        ids = self.builder.checked_ids(token_ids, param="tokens") if token_ids else ()
        text: str = self.tokenizer.decode(list(ids))
        return text

    def text_of(self, prompt: Prompt) -> str:
        """Decode a prompt, without special tokens."""
        text: str = self.tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=True)
        return text

    def __repr__(self) -> str:
        facts = [repr(self.model_name), f"engine={self.settings.engine!r}"]
        if not self.healthy:
            return f"LLM({', '.join(facts)}, closed)"
        facts.append(f"policy={self.default_policy().name!r}")
        with suppress(StoreError):  # repr must not fail
            facts.append(f"context_caches={self.catalog.usage(DEFAULT_TENANT).caches}")
        return f"LLM({', '.join(facts)})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_unknown(arguments: Iterable[str], fields: type) -> None:
    """Raise UnknownArgumentError for a name that is no field of the ``TypedDict`` ``fields``."""
    known = fields.__annotations__
    for name in arguments:
        if name not in known:
            raise UnknownArgumentError(
                f"There is no argument {name!r}.{did_you_mean(name, known)}", param=name
            )


def _are_all(values: Sequence[object], kind: type[K]) -> TypeGuard[Sequence[K]]:
    """Return whether these are values of a kind."""
    return isinstance(values, list | tuple) and set(map(type, values)) <= {kind}
