"""The Python API: one model with its engine, store and catalog; the server and the command line use
it, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, Unpack, overload

from kvlinker.base.errors import (
    InvalidRequestError,
    StoreError,
    UnknownArgumentError,
    did_you_mean,
)
from kvlinker.base.loading import Report, unreported
from kvlinker.base.types.answers import PromptLogprobs
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.messages import CachedPart, CompletionPrompt, Implicit, TemplateOptions
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.engines.contract.contract import GenerationRequest, RequestHandle
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking import Explanation, Policy
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.segments import Prompt
from kvlinker.service.agents.workflows import WorkflowStep
from kvlinker.service.answer import Answer, AnswerBuilder, AnswerStream, ChoiceSink
from kvlinker.service.content import (
    ChatOptions,
    CompletionContent,
    ContentPart,
    Documents,
    Message,
    Messages,
    parse_tools,
    refuse_tools_in_text,
)
from kvlinker.service.context_caches import ContextCacheCalls
from kvlinker.service.context_caches.kept_answers import KeepRequest
from kvlinker.service.model_calls import ModelCalls
from kvlinker.service.prompt_calls import PreparedRequest, PromptCalls
from kvlinker.service.reading import ReadPrompt
from kvlinker.service.startup import EmbeddedSource, EngineSource, engine_source
from kvlinker.settings import Options, Settings, load_settings

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


class LLM(ContextCacheCalls, ModelCalls, PromptCalls):
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
