"""The calls of an LLM that requests for answers consist of: read a prompt, say how answers may use
tools, and queue choices. The library's other calls and the server's routes are made of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard, TypeVar, get_args

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import salt_of
from kvlinker.base.types.grammars import check_grammar
from kvlinker.base.types.messages import (
    CachedPart,
    ChatMessage,
    CompletionPrompt,
    Document,
    Implicit,
    TemplateOptions,
)
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.base.types.tools import Tool, function_of, shown_tool
from kvlinker.engines.contract.contract import GenerationRequest, RequestHandle, Sink
from kvlinker.linking import Policy, as_policy
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader
from kvlinker.prompting.chat import DEFAULT_OPTIONS
from kvlinker.prompting.segments import Prompt
from kvlinker.service.agents.workflows import WorkflowStep
from kvlinker.service.content import (
    CompletionContent,
    Documents,
    Messages,
    Order,
    ToolChoice,
    parse_documents,
    parse_implicit,
    parse_messages,
    parse_prompt,
)
from kvlinker.service.context_caches.kept_answers import KeepRequest
from kvlinker.service.reading import ReadOptions, ReadPrompt
from kvlinker.service.startup import Parts
from kvlinker.settings import AUTO

TAIL_TOKENS = 1024
"""The most tokens of a prompt's end that are decoded to find out how an answer begins."""


K = TypeVar("K")


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
        check_grammar(fields.get("grammar"))
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


def _are_all(values: Sequence[object], kind: type[K]) -> TypeGuard[Sequence[K]]:
    """Return whether these are values of a kind."""
    return isinstance(values, list | tuple) and set(map(type, values)) <= {kind}


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


class PromptCalls(Parts):
    """The calls of ``LLM`` from content to the engine."""

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
