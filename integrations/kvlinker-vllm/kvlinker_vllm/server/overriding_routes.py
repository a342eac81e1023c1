"""Linked requests in vLLM's own server: kvlinker makes the prompt and its plan, and vLLM's handlers
do everything else.

They get the prompt's token ids, the signed transfer plan and a salt in fields that vLLM has for
them, and every other field as it came: sampling, forms of answers, tools, reasoning and streams are
vLLM's, by its own parsers.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.exceptions import VLLMValidationError

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import RequestFinished
from kvlinker.base.types.limits import MAX_CHOICES
from kvlinker.base.types.messages import (
    MARKS,
    ContextCacheReference,
    MarkedText,
    TemplateOptions,
    TokenIds,
)
from kvlinker.doors.http.answers.chat import DocumentBody, MessageBody
from kvlinker.doors.http.answers.completions import PromptBody, has_several, prompts_of
from kvlinker.doors.http.answers.link_bodies import link_body
from kvlinker.doors.http.edge.errors import blaming
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.generation import NO_LINK_OPTIONS, LinkOptions
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.llm import LLM, ReadPrompt
from kvlinker_vllm.frontend.engine import VLLMEngine
from kvlinker_vllm.frontend.linker import PreparedPrompt
from kvlinker_vllm.server.forwarding import (
    Answer,
    AnswerEditor,
    json_bytes,
    replay_body,
    with_length,
)
from kvlinker_vllm.server.route_override import OUTER, RouteOverride

DEFAULT_MODEL = "default"
"""The name by which requests may call kvlinker's model, whatever its own is. vLLM needs no model
name at all."""

UNLINKABLE: Mapping[str, str] = {
    "use_beam_search": "each beam is a separate prompt without a plan",
    "prompt_logprobs": "vLLM gives log probabilities of prompts only if it computes all tokens",
    "truncate_prompt_tokens": "a plan is for the whole prompt",
    "kv_transfer_params": "kvlinker puts its plan into this field",
    "prompt_embeds": "a plan is for token ids",
    "suffix": "vLLM would add it to the prompt after the plan is made",
}
"""vLLM's fields that cannot be combined with linking, and why."""

_OF_CHAT = {
    "echo": "vLLM would render the messages itself",
    "chat_template": "context caches are placed by the server's own template",
}


class ChatFields(BaseModel):
    """The fields of a conversation that linking reads."""

    model_config = ConfigDict(strict=True, frozen=True)

    messages: list[MessageBody] = Field(min_length=1)
    documents: list[DocumentBody] | None = None
    link: LinkOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    cache_salt: str | None = None


class CompletionFields(BaseModel):
    """The fields of a completion that linking looks at."""

    model_config = ConfigDict(strict=True, frozen=True)

    prompt: PromptBody
    link: LinkOptions | None = None
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    cache_salt: str | None = None


class OverridingRoutes:
    """Routes that take the places of kvlinker's own in vLLM's server."""

    def __init__(self, override: RouteOverride, llm: LLM, renderer: Any) -> None:
        """``renderer`` is the ``OnlineRenderer`` of vLLM's server, ``llm`` is over a
        ``VLLMEngine``."""
        self._override = override
        self._llm = llm
        self._engine = cast(VLLMEngine, llm.engine)
        self._renderer = renderer
        self.router = APIRouter()
        self.router.post("/v1/chat/completions")(self.chat)
        self.router.post("/v1/completions")(self.complete)

    async def chat(
        self, body: ChatFields, request: Request, served: ServedModelParam, tenant: TenantParam
    ) -> Response:
        """Link the context caches and marked texts of a conversation, and have vLLM answer it."""
        fields = json.loads(await request.body())
        plain = _plain_fields(fields)
        plain["messages"] = [_plain_message(message) for message in fields["messages"]]
        if isinstance(fields.get("tools"), list):
            plain["tools"] = [_strip_marks(tool) for tool in fields["tools"]]
        try:
            asked = ChatCompletionRequest.model_validate(copy.deepcopy(plain))
        except (ValidationError, VLLMValidationError):
            return _Forwarded(self._override, plain)  # vLLM says what is wrong
        messages = [message.message() for message in body.messages]
        documents = [document.document() for document in body.documents or ()]
        options, link = (
            self._template_options(asked, fields.get("tools") or ()),
            body.link or NO_LINK_OPTIONS,
        )

        def read() -> ReadPrompt:
            return served.llm.read_chat(
                messages,
                documents=documents,
                options=options,
                policy=link.policy,
                implicit=link.implicit,
                salt=body.cache_salt,
                order=link.order or "given",
                tenant=tenant,
            )

        with blaming("messages"):
            found = await served.encoding.run(request, read)
            if not found.prompt.chunks:
                return _Forwarded(self._override, plain)
            _check_linkable(fields, {**UNLINKABLE, **_OF_CHAT})
            prepared = await self._prepare(found, link, tenant, n=body.n or 1)
        plain.pop("documents", None)
        plain["kv_transfer_params"] = {**prepared.params, "prompt_token_ids": prepared.tokens}
        return self._forward_linked(plain, found, prepared, tenant)

    async def complete(
        self,
        body: CompletionFields,
        request: Request,
        served: ServedModelParam,
        tenant: TenantParam,
    ) -> Response:
        """Link the context caches and marked texts of a prompt, and have vLLM go on with it."""
        fields = json.loads(await request.body())
        plain = _plain_fields(fields)
        given, *others = prompts_of(body.prompt)
        if others or has_several(body.prompt) or isinstance(given, TokenIds):
            return _Forwarded(self._override, plain)

        link = body.link or NO_LINK_OPTIONS

        def read() -> ReadPrompt:
            return served.llm.read_completion(
                given,
                policy=link.policy,
                implicit=link.implicit,
                salt=body.cache_salt,
                order=link.order or "given",
                tenant=tenant,
            )

        with blaming("prompt"):
            found = await served.encoding.run(request, read)
            if not found.prompt.chunks:
                texts = [part.text if isinstance(part, MarkedText) else part for part in given]
                plain["prompt"] = "".join(
                    text for text in texts if not isinstance(text, ContextCacheReference)
                )
                return _Forwarded(self._override, plain)
            scored = (
                {"logprobs": "an echo includes those of the prompt"} if fields.get("echo") else {}
            )
            _check_linkable(fields, {**UNLINKABLE, **scored})
            prepared = await self._prepare(found, link, tenant, n=body.n or 1)
        plain["prompt"] = prepared.tokens
        plain["kv_transfer_params"] = dict(prepared.params)
        return self._forward_linked(plain, found, prepared, tenant)

    def _template_options(
        self, asked: ChatCompletionRequest, given: Sequence[Mapping[str, Any]]
    ) -> TemplateOptions:
        """Return how vLLM would render the chat template for a request, with the marks of the tools
        as ``given``."""
        hidden = asked.tool_choice == "none" and self._renderer.exclude_tools_when_tool_choice_none
        variables = self._renderer.effective_chat_template_kwargs(asked)
        tools = zip(asked.tools or (), given, strict=True)
        return TemplateOptions(
            tools=() if hidden else tuple(tool.model_dump() | _marks(each) for tool, each in tools),
            variables={
                name: value
                for name, value in variables.items()
                if value is not None and self._llm.builder.template.has_variable(name)
            },
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )

    async def _prepare(
        self, read: ReadPrompt, link: LinkOptions, tenant: str, *, n: int
    ) -> PreparedPrompt:
        request = GenerationRequest(
            read.prompt,
            read.policy,
            tenant=tenant,
            n=n,
            salt=read.salt,
            explains=bool(link.explain),
            keeps_answer=link.keep in ("answer", "all"),
        )
        step = link.step
        if step is None:
            return await asyncio.wrap_future(self._engine.prepare(request))
        workflows = self._llm.agents.workflows
        expected = await run_in_threadpool(workflows.expected, step, tenant=tenant)
        prepared = await asyncio.wrap_future(self._engine.prepare(request))
        await run_in_threadpool(workflows.begin, step, expected, read.keys, tenant=tenant)
        return prepared

    def _forward_linked(
        self, plain: dict[str, Any], read: ReadPrompt, prepared: PreparedPrompt, tenant: str
    ) -> Response:
        plain["cache_salt"] = prepared.salt
        return _Forwarded(self._override, plain, _AddedFields(self._llm, read, prepared, tenant))


class _AddedFields:
    """kvlinker's additions to vLLM's answer to a linked request, whole or in chunks."""

    def __init__(self, llm: LLM, read: ReadPrompt, prepared: PreparedPrompt, tenant: str) -> None:
        self._llm = llm
        self._read = read
        self._prepared = prepared
        self._tenant = tenant
        self._link: Any = link_body([read])
        self._reason = "cancelled"
        self._output_tokens = 0
        self._transfer: Mapping[str, Any] | None = None

    def edit(self, answer: Answer) -> None:
        """Add how the prompt was linked to the first chunk, and to every usage the tokens of
        context caches."""
        if self._link is not None:
            answer["link"], self._link = self._link.model_dump(), None
        if "kv_transfer_params" in answer:
            self._transfer, answer["kv_transfer_params"] = answer["kv_transfer_params"], None
        self._reason = next(
            (c["finish_reason"] for c in answer["choices"] if c.get("finish_reason")), self._reason
        )
        if usage := answer.get("usage"):
            self._output_tokens = usage.get("completion_tokens") or 0
            counted = self._prepared.usage(self._transfer, self._output_tokens)
            usage["prompt_tokens_details"] = {
                **(usage.get("prompt_tokens_details") or {}),
                "cached_tokens": counted.cached_tokens,
                "exact_cached_tokens": counted.exact_cached_tokens,
                "recomputed_tokens": counted.recomputed_tokens,
                "reusable_tokens": self._read.reusable_of(counted),
            }

    def note(self) -> None:
        """Report an answer that has ended to the store and to listeners."""
        cast(VLLMEngine, self._llm.engine).note_uses(self._prepared, self._tenant, self._transfer)
        counted = self._prepared.usage(self._transfer, self._output_tokens)
        self._llm.events.publish(
            RequestFinished(
                policy=self._read.policy.name,
                reason=self._reason,
                cached_tokens=counted.cached_tokens,
                exact_cached_tokens=counted.exact_cached_tokens,
                recomputed_tokens=counted.recomputed_tokens,
                fresh_tokens=counted.fresh_tokens,
                output_tokens=counted.output_tokens,
            )
        )


class _Forwarded(Response):
    """The answer of vLLM's own route to a request with another body."""

    def __init__(
        self, override: RouteOverride, body: Mapping[str, Any], linked: _AddedFields | None = None
    ) -> None:
        super().__init__()
        self._override = override
        self._content = json_bytes(body)
        self._answer = linked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outer = with_length(scope[OUTER], len(self._content))
        receive = replay_body(self._content, receive)
        if self._answer is None:
            return await self._override.pass_on(outer, receive, send)
        editor = AnswerEditor(send, self._answer.edit)
        try:
            await self._override.pass_on(outer, receive, editor)
        finally:
            if editor.succeeded:
                self._answer.note()
        return None


def _plain_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's fields without those that only kvlinker knows: how to link, and a name for
    any model."""
    plain = {name: value for name, value in fields.items() if name != "link"}
    if plain.get("model") == DEFAULT_MODEL:
        del plain["model"]
    return plain


def _plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without fields that only kvlinker knows; the prompt is made of the
    original."""
    content = message.get("content")
    return (
        {**message, "content": [_plain_part(part) for part in content]}
        if isinstance(content, list)
        else message
    )


def _plain_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": ""} if part["type"] == "context_cache" else _strip_marks(part)


def _strip_marks(given: Any) -> Any:
    """Return a part or a tool without its marks."""
    return (
        {name: value for name, value in given.items() if name not in MARKS}
        if isinstance(given, dict)
        else given
    )


def _marks(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the marks of a tool alone."""
    return {name: given[name] for name in MARKS if name in given}


def _check_linkable(fields: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """Raise InvalidRequestError for a field that cannot be combined with linking."""
    for name, cause in refused.items():
        if fields.get(name) is not None and fields[name] is not False:
            raise InvalidRequestError(
                f"{name!r} cannot be combined with context caches: {cause}. Leave it out, or send"
                " the texts instead.",
                param=name,
            )
