"""The Python API: one model with its engine, store and catalog; the server and the command line
stand on it, too."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Self, Unpack

from kvlinker.base.arguments import names_arguments, takes_fields_of
from kvlinker.base.errors import InvalidRequestError, StoreError
from kvlinker.base.events import Events
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.messages import (
    Implicit,
    TemplateOptions,
)
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.base.types.tools import Tool
from kvlinker.engines.contract.contract import Engine, GenerationRequest, RequestHandle
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking import Explanation, Policy, parse_policy
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.builder import PromptBuilder
from kvlinker.prompting.request_tools import RequestTools, ToolChoice
from kvlinker.prompting.segments import Prompt
from kvlinker.service.answer import Answer, ChoiceSink, wait_for_answer
from kvlinker.service.audit.policy_manager import PolicyManager
from kvlinker.service.content import (
    CompletionContent,
    ContentPart,
    Message,
    parse_tools,
)
from kvlinker.service.context_caches import ChunkTexts, ContextCacheCalls, ContextCaches
from kvlinker.service.implicit.caches import ImplicitCaches
from kvlinker.service.implicit.recognition import Recognizer
from kvlinker.service.prompt_calls import Documents, Messages, PromptCalls
from kvlinker.service.reading import ContentReader, ReadDefaults, ReadPrompt
from kvlinker.service.residency import Residency
from kvlinker.service.startup import EmbeddedSource, EngineSource, engine_source, open_state
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


class PreparedChat(NamedTuple):
    """Holds what a call of ``chat_completion`` asks the engine for."""

    read: ReadPrompt
    sampling: SamplingParams

    reader: Reader
    """Reads the answer."""


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
    def from_settings(cls, settings: Settings) -> Self:
        """Load ``settings.model`` and start."""
        return cls.from_source(engine_source(settings), settings)

    @classmethod
    def from_model(cls, loaded: LoadedModel, settings: Settings) -> Self:
        """Start on a model that is in memory already, such as one of
        ``model_loading.prepare_model``."""
        return cls.from_source(EmbeddedSource(loaded), settings)

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
            ),
            events=self.events,
            quotas=settings.quotas,
            implicit_caches=settings.implicit_caches,
        )
        started.callback(self.caches.close)
        self.residency = Residency(self.store, kv_bytes_per_token=self.engine.kv_bytes_per_token)
        self.events.subscribe(self.residency.listen)
        self.policy_manager = PolicyManager(
            settings, self.engine, self.events, model=self.model_name, decode=self._decode
        )
        started.callback(self.policy_manager.close)
        started.callback(self.engine.close)  # before all others, so that what they wait for ends
        self._content = ContentReader(
            self.builder,
            self.caches,
            ImplicitCaches(
                self.builder, self.caches, self.catalog, self.events, ttl=settings.implicit_ttl
            ),
            Recognizer(self.catalog, self.builder.encoder, fingerprint=self.engine.fingerprint),
            ReadDefaults(
                policy=self.policy_manager.default_policy,
                implicit=Implicit(settings.implicit),
                implicit_policy=None
                if settings.implicit_policy is None
                else parse_policy(settings.implicit_policy),
                steered=self.policy_manager.controller is not None,
            ),
        )

    def request_tools(
        self, tools: Sequence[Tool] = (), choice: ToolChoice | None = None, *, several: bool = True
    ) -> RequestTools:
        """Return how the answers to a conversation may use ``tools``; ``several``: with more than
        one call. Raises InvalidRequestError for a choice of tools that are not offered."""
        return RequestTools(self.answer_form, self.tail_of, tools, choice, several=several)

    @takes_fields_of(SamplingParams)
    def chat_completion(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents = (),
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: ToolChoice | None = None,
        parallel_tool_calls: bool = True,
        response_format: Mapping[str, Any] | None = None,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        **sampling: Any,
    ) -> Answer:
        """Answer a conversation whose content mixes text and context caches, in any order, or a
        prompt made of one.

        ``documents``, marked parts and marked tools become chunks, as ``implicit`` says: "auto",
        "marked" or "off". ``tools``, ``tool_choice``, ``parallel_tool_calls`` and
        ``response_format`` are OpenAI's; the answer tells calls and reasoning apart from its text.
        ``policy``: a name, or a policy, which need not be registered. ``sampling`` are the fields
        of SamplingParams, such as ``max_tokens`` and ``temperature``. Raises InvalidRequestError,
        also for a form or a schema that cannot be enforced.
        """
        asked = self.ask_chat(
            messages,
            documents=documents,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            response_format=response_format,
            policy=policy,
            implicit=implicit,
            tenant=tenant,
            sampling=sampling,
        )
        return self._answer(asked.read, asked.sampling, tenant).read_by(asked.reader)

    def ask_chat(
        self,
        messages: Messages | Prompt,
        *,
        documents: Documents,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: ToolChoice | None,
        parallel_tool_calls: bool,
        response_format: Mapping[str, Any] | None,
        policy: str | Policy | None,
        implicit: Implicit | str | None,
        tenant: str,
        sampling: Mapping[str, Any],
    ) -> PreparedChat:
        """Return what a call of ``chat_completion`` asks for, ready to be submitted. Raises what
        that does."""
        request_tools = self.request_tools(
            parse_tools(tools), tool_choice, several=parallel_tool_calls
        )
        options = TemplateOptions(tools=request_tools.tools)
        read = self.read_chat(
            messages,
            documents=documents,
            options=options,
            policy=policy,
            implicit=implicit,
            tenant=tenant,
        )
        given = dict(sampling)
        if response_format is not None and (form := AnswerGrammar.response_format(response_format)):
            if given.get("grammar") is not None:
                raise InvalidRequestError(
                    "'response_format' and 'grammar' both ask for a form: give one of them.",
                    param="response_format",
                )
            given["grammar"] = form
        params = self.sampling_params(**request_tools.sampling_fields(read.prompt, given))
        return PreparedChat(read, params, request_tools.reader(read.prompt))

    @takes_fields_of(SamplingParams)
    def completion(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        implicit: Implicit | str | None = None,
        tenant: str = DEFAULT_TENANT,
        **sampling: Any,
    ) -> Answer:
        """Continue a text, token ids, or a list of texts and context caches; no chat template."""
        read = self.read_completion(prompt, policy=policy, implicit=implicit, tenant=tenant)
        return self._answer(read, self.sampling_params(**sampling), tenant)

    def submit(
        self,
        read: ReadPrompt,
        sampling: SamplingParams,
        sink: ChoiceSink,
        *,
        n: int = 1,
        explains: bool = False,
        shows_attention: bool = False,
        tenant: str = DEFAULT_TENANT,
    ) -> RequestHandle:
        """Queue ``n`` choices for one prompt under its policy and return at once; events come from
        the engine's thread.

        ``read`` is what ``read_chat`` or ``read_completion`` returns. With a seed, choice i uses
        seed + i. When one choice cannot be queued, none is. The handle cancels all. With
        ``explains``, the first choice's ``Finished`` has an explanation of how the prompt was
        linked, and with ``shows_attention`` the question's attention in it. Raises what
        ``Engine.generate`` does.
        """
        words = [self.builder.encoder.encode_word(word) for word in sampling.bad_words]
        bad_words = tuple(chain.from_iterable(words))
        request = GenerationRequest(
            read.prompt,
            read.policy,
            sampling,
            tenant,
            n,
            bad_words=bad_words,
            explains=explains,
            shows_attention=shows_attention,
        )
        return self.engine.generate(
            *self.policy_manager.watch(request, sink, implicit=read.implicit)
        )

    def __repr__(self) -> str:
        facts = [repr(self.model_name), f"engine={self.settings.engine!r}"]
        if not self.healthy:
            return f"LLM({', '.join(facts)}, closed)"
        facts.append(f"policy={self.default_policy().name!r}")
        with suppress(StoreError):  # whoever prints must not fail
            facts.append(f"context_caches={self.catalog.usage(DEFAULT_TENANT).caches}")
        return f"LLM({', '.join(facts)})"

    def close(self) -> None:
        """Stop the engine and write what is still to be written. Idempotent."""
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, read: ReadPrompt, params: SamplingParams, tenant: str) -> Answer:
        def submit(sink: ChoiceSink) -> RequestHandle:
            return self.submit(read, params, sink, tenant=tenant)

        answer = wait_for_answer(submit)
        return replace(answer, context_caches=read.linked)

    def _decode(self, token_ids: Sequence[int]) -> str:
        """Decode tokens, with special ones."""
        text: str = self.tokenizer.decode(list(token_ids))
        return text
