"""The Python API: one model with its engine, store and catalog; the server and the command line use
it, too."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, Self, Unpack, overload

from kvlinker.base.arguments import names_arguments, takes_fields_of
from kvlinker.base.errors import InvalidRequestError, StoreError
from kvlinker.base.events import Events
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.messages import Implicit, TemplateOptions
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.base.types.tools import Tool
from kvlinker.engines.contract.contract import Engine, GenerationRequest, RequestHandle
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking import Explanation, Policy
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.request_tools import RequestTools, ToolChoice
from kvlinker.prompting.segments import Prompt
from kvlinker.service.answer import (
    Answer,
    AnswerBuilder,
    AnswerStream,
    ChoiceSink,
    wait_for_answer,
)
from kvlinker.service.audit.policy_manager import PolicyManager, with_usable_policy
from kvlinker.service.builders import BuilderClient
from kvlinker.service.content import CompletionContent, ContentPart, Message, parse_tools
from kvlinker.service.context_caches import ChunkTexts, ContextCacheCalls, ContextCaches
from kvlinker.service.context_caches.building import Building
from kvlinker.service.context_caches.kept_answers import AnswerKeeper, KeepRequest
from kvlinker.service.embedding import Embedder
from kvlinker.service.implicit.ahead import PassagesAhead
from kvlinker.service.implicit.caches import ImplicitCaches
from kvlinker.service.implicit.recognition import Recognizer
from kvlinker.service.preloading import Preloading
from kvlinker.service.prompt_calls import (
    ChatOptions,
    Messages,
    PreparedRequest,
    PromptCalls,
    refuse_tools_in_text,
)
from kvlinker.service.reading import ContentReader, ReadPrompt
from kvlinker.service.residency import Residency
from kvlinker.service.startup import EmbeddedSource, EngineSource, engine_source, open_state
from kvlinker.service.tool_waits import ToolWaits
from kvlinker.service.workflows import Workflows, WorkflowStep
from kvlinker.settings import Options, Settings, load_settings
from kvlinker.store import Speeds
from kvlinker.store.speeds import FILE_NAME

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


@names_arguments
class LLM(ContextCacheCalls, PromptCalls):
    """A model that answers prompts made of cached chunks and fresh text.

    ``model``: local path or hub id; without it the small model that ships with kvlinker.
    ``options`` are the fields of ``Settings``, such as ``policy="legolink-16"`` or
    ``state_dir="/data/kvlinker"``. All methods may be called from any thread.
    """

    def __init__(self, model: str | Path | None = None, **options: Unpack[Options]) -> None:
        settings = load_settings(model=str(model) if model is not None else None, **options)
        self._start(engine_source(settings), settings)

    @classmethod
    def from_settings(cls, settings: Settings, *, builders: BuilderClient | None = None) -> Self:
        """Load ``settings.model`` and start. ``builders``, whom servers ask for chunks that they
        lack, are closed with it."""
        return cls.from_source(engine_source(settings, builders), settings)

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

    def _start(self, source: EngineSource, settings: Settings) -> None:
        with ExitStack() as started:
            self._start_parts(source, settings, started)
            self._closing = started.pop_all()

    def _start_parts(self, source: EngineSource, settings: Settings, started: ExitStack) -> None:
        """Make the parts, each of which ``started`` closes."""
        self.settings = settings
        self.events = Events()
        self.model_name = settings.served_name
        self.created_at = time.time()
        self.tokenizer = source.tokenizer
        self.sampling_defaults = (
            source.sampling_defaults if settings.generation_config == "auto" else {}
        )
        self.speeds = Speeds(settings.state_dir / FILE_NAME)
        started.callback(self.speeds.close)
        self.embedder = Embedder(settings) if settings.embedding_model else None
        if self.embedder is not None:
            started.callback(self.embedder.close)
        self.catalog, self.store = open_state(
            settings,
            self.events,
            host_bytes=settings.host_memory if source.uses_host_memory else 0,
            device=source.device,
            speeds=self.speeds,
        )
        started.callback(self.catalog.close)
        started.callback(self.store.close)
        self.engine: Engine = source.make(
            self.catalog, self.store, self.events, settings, self.speeds
        )
        started.callback(self.engine.close)
        self.builder = PromptBuilder(
            self.tokenizer,
            context=settings.generation_context,
            system_prompt=settings.system_prompt,
            chat_template=settings.chat_template,
            max_tokens=self.engine.max_model_len,
        )
        self.caches = ContextCaches(
            model=self.model_name,
            builder=self.builder,
            engine=self.engine,
            catalog=self.catalog,
            store=self.store,
            texts=ChunkTexts(
                self.catalog,
                self.builder.encoder,
                fingerprint=self.engine.fingerprint,
                searchable=settings.searchable,
                embedder=self.embedder,
            ),
            events=self.events,
            quotas=settings.quotas,
            implicit_caches=settings.implicit_caches,
            builds=settings.role == "build",
        )
        started.callback(self.caches.close)
        self._keeper = AnswerKeeper(
            self.builder.encoder, self.caches, self.events, ttl=settings.implicit_ttl
        )
        started.callback(self._keeper.close)
        self._tool_waits = ToolWaits(self.engine, longest=settings.tool_wait)
        started.callback(self._tool_waits.close)
        self.building = Building(self.engine, self.catalog, self.store)
        started.callback(self.building.close)
        self.residency = Residency(
            self.store,
            kv_bytes=self.engine.kv_bytes,
            resident_keys=self.engine.resident_keys,
        )
        self.events.subscribe(self.residency.listen)
        self.preloading = Preloading(self.catalog, self.store, self.engine)
        started.callback(self.preloading.close)
        self.workflows = Workflows(self.caches, self.store.next_uses, self.preloading, self.events)
        settings = with_usable_policy(settings, self.engine)
        self.policy_manager = PolicyManager(
            settings, self.engine, self.events, model=self.model_name, decode=self.decode_ids
        )
        started.callback(self.policy_manager.close)
        implicit = ImplicitCaches(
            self.builder,
            self.engine,
            self.caches.creation,
            self.catalog,
            self.events,
            ttl=settings.implicit_ttl,
        )
        ahead = None
        if settings.implicit_ahead == "on" and settings.engine == "embedded":
            ahead = PassagesAhead(
                implicit,
                self.engine,
                self.catalog,
                self.store,
                most_caches=settings.implicit_caches,
                quotas=settings.quotas,
            )
            started.callback(ahead.close)
        self._content = ContentReader(
            self.builder,
            self.caches,
            implicit,
            Recognizer(
                self.catalog,
                self.builder.encoder,
                self.events,
                fingerprint=self.engine.fingerprint,
            ),
            self.policy_manager,
            Implicit(settings.implicit),
            ahead,
        )
        started.callback(self.engine.close)  # before all others, so that what they wait for ends

    def request_tools(
        self,
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        several: bool = True,
        most_reasoning: int | None = None,
    ) -> RequestTools:
        """Return how the answers to a conversation may use ``tools``; ``several``: with more than
        one call; ``most_reasoning``: after so many tokens of reasoning at most. Raises
        InvalidRequestError for a choice of tools that are not offered."""
        form = self.answer_form.limited(most_reasoning)
        return RequestTools(form, self.tail_of, tools, choice, several=several)

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

    @takes_fields_of(ChatOptions)
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

    @takes_fields_of(ChatOptions)
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
        tools = self.request_tools(
            parse_tools(options.get("tools", ())),
            options.get("tool_choice"),
            several=options.get("parallel_tool_calls", True),
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
        return asked, self.answer_builder(read, reader())

    @takes_fields_of(SamplingFields)
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
        read = self.read_completion(prompt, policy=policy, implicit=implicit, tenant=tenant)
        params = self.sampling_params(**sampling)
        answer = wait_for_answer(lambda sink: self.submit(read, params, sink, tenant=tenant))
        return replace(answer, context_caches=read.linked)

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

    def submit_prepared(
        self, asked: PreparedRequest, sink: ChoiceSink, *, number: int = 0, n: int = 1
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
        words = [self.builder.encoder.encode_word(word) for word in asked.sampling.bad_words]
        request = GenerationRequest(
            read.prompt,
            read.policy,
            asked.sampling,
            tenant,
            n,
            salt=read.salt,
            bad_words=tuple(chain.from_iterable(words)),
            explains=asked.explains,
            shows_attention=asked.shows_attention,
            keeps_answer=keep is not None,
            workflow=asked.step.name if asked.step else None,
        )
        if asked.step is not None:
            sink = self.workflows.watch(sink)
        if keep is not None:
            sink = self._keeper.watch(sink, keep, tenant=tenant, salt=read.salt)
        if asked.calls is not None:
            sink = self._tool_waits.watch(request, sink, asked.calls)
        expected = self.workflows.expected(asked.step, tenant=tenant) if asked.step else ()
        if (auditor := self.policy_manager.auditor) is not None:
            request, sink = auditor.watch(request, sink, implicit=read.implicit)
        handle = self.engine.generate(request, sink)
        self.workflows.begin(asked.step, expected, read.keys, tenant=tenant)
        return handle

    def __repr__(self) -> str:
        facts = [repr(self.model_name), f"engine={self.settings.engine!r}"]
        if not self.healthy:
            return f"LLM({', '.join(facts)}, closed)"
        facts.append(f"policy={self.default_policy().name!r}")
        with suppress(StoreError):  # repr must not fail
            facts.append(f"context_caches={self.catalog.usage(DEFAULT_TENANT).caches}")
        return f"LLM({', '.join(facts)})"

    def close(self) -> None:
        """Stop the engine and finish pending writes. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
