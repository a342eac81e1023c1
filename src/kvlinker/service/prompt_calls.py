"""The calls of an LLM that read prompts: build them, score them, and explain how they are
linked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Literal, NamedTuple, get_args

from kvlinker.base.arguments import names_arguments
from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.answers import PromptLogprobs
from kvlinker.base.types.chunks import salt_of
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    Document,
    Implicit,
    TemplateOptions,
)
from kvlinker.base.types.sampling import SamplingFields, SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.linking import Explanation, Policy, as_policy
from kvlinker.prompting.answer_forms.reader import Reader
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.request_tools import ToolChoice
from kvlinker.prompting.segments import Prompt
from kvlinker.service.answer import Answer, AnswerBuilder
from kvlinker.service.content import (
    CompletionContent,
    Message,
    parse_documents,
    parse_implicit,
    parse_messages,
    parse_prompt,
)
from kvlinker.service.context_caches.kept_answers import KeepRequest, KeptPart
from kvlinker.service.model_calls import ModelCalls
from kvlinker.service.reading import ContentReader, ReadOptions, ReadPrompt
from kvlinker.service.workflows import WorkflowStep

Messages = Sequence[Message | ChatMessage[CachedPart]]
"""A conversation, as dictionaries or as typed messages."""

Documents = Sequence[Mapping[str, Any] | Document[CachedPart]]
"""Documents of a conversation: each has a ``text``, and perhaps a ``title`` and more that chat
templates show."""


Order = Literal["given", "any"]
"""Whether documents, and neighbouring chunks, keep their order."""


class ChatOptions(SamplingFields, total=False):
    """The keyword arguments of ``LLM.chat_completion`` and ``stream``: these, and sampling
    parameters such as ``max_tokens`` and ``temperature``."""

    documents: Documents
    """They become chunks, as ``implicit`` says, and so do marked parts and marked tools."""

    tools: Sequence[Mapping[str, Any]]
    """OpenAI's, as are ``tool_choice``, ``parallel_tool_calls`` and ``response_format``."""

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    response_format: Mapping[str, Any] | None

    policy: str | Policy | None
    """A name, or a policy, which need not be registered."""

    order: Order | None
    """"any": documents, and neighbouring chunks, may be reordered as they were linked before, so
    that nothing is computed again."""

    implicit: Implicit | str | None
    """Which texts become chunks without an id: "auto", "marked" or "off"."""

    keep: KeptPart | Literal["off"] | None
    """Which part of the answer becomes a context cache, ``Answer.kept``, with the KV that it was
    generated with; by default, as the settings say."""

    ttl: float | None
    """The seconds that it lives from its last use."""

    workflow: str | None
    """The name of a workflow that this is a request of."""

    next: Sequence[Mapping[str, Any]] | None
    """The context caches that the workflow will use: ``ids`` of context caches, and in how many
    ``steps``, its requests from this one on, or ``seconds``."""

    explain: bool
    """True: the answer has an ``explanation`` of how its prompt was linked."""

    tenant: str


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


def refuse_tools_in_text(options: ChatOptions) -> None:
    """Raise InvalidRequestError if the text of an answer is asked for that may have calls."""
    if options.get("tools") and options.get("tool_choice") != "none":
        raise InvalidRequestError(
            "'stream' gives the answer's text alone, in which no calls of 'tools' are: call the"
            " method 'stream', or leave one of them out.",
            param="stream",
        )


@names_arguments
class PromptCalls(ModelCalls):
    """The calls of ``LLM`` that generate nothing."""

    _content: ContentReader

    def score(
        self,
        prompt: CompletionContent,
        *,
        policy: str | Policy | None = None,
        tenant: str = DEFAULT_TENANT,
        logprobs: int | None = None,
    ) -> PromptLogprobs:
        """Return the log probabilities of a prompt's last tokens: those after its last context
        cache, but for the first of them.

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

    def answer_builder(self, read: ReadPrompt, reader: Reader) -> AnswerBuilder:
        """Return the builder of the answer to a prompt, whose text ``reader`` reads."""

        def complete(answer: Answer) -> Answer:
            explanation = answer.explanation and self.described(answer.explanation, read)
            return replace(answer, explanation=explanation, context_caches=read.linked)

        return AnswerBuilder(reader, complete)

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
        how = self._reading(policy, implicit, keeps, tenant, salt, order)
        if isinstance(messages, Prompt):
            return ReadPrompt(messages, how.policy or self.default_policy(tenant), {}, how.salt)
        return self._content.chat(
            parse_messages(messages), how, parse_documents(documents), options
        )

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
        how = self._reading(policy, implicit, keeps, tenant, salt, order)
        how = replace(how, special_tokens=special_tokens)
        return self._content.completion(parse_prompt(prompt), how)

    def _reading(
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
        named = None if policy is None else as_policy(policy)
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
