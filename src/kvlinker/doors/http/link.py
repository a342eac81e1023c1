"""/v1/policies and /v1/link/explain: the list of policies, and the effect of one on a prompt."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import asdict
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse
from pydantic import Field

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MOST_DOCUMENTS, MOST_MESSAGES, MOST_TOOLS
from kvlinker.base.types.messages import TemplateOptions
from kvlinker.doors.http.answers.chat import DocumentBody, MessageBody
from kvlinker.doors.http.answers.completions import PromptBody, single_prompt
from kvlinker.doors.http.answers.link_bodies import LinkExplanation
from kvlinker.doors.http.edge.errors import blaming, error_responses
from kvlinker.doors.http.edge.guards import TenantParam, cancel_on_disconnect
from kvlinker.doors.http.fields.bodies import (
    RequestBody,
    ResponseBody,
    Text,
)
from kvlinker.doors.http.fields.generation import NO_LINK_OPTIONS, LinkOptions
from kvlinker.doors.http.fields.tools import ToolBody, template_tools
from kvlinker.doors.http.models import BodyRoute, ServedModel, ServedModelParam
from kvlinker.llm import Explanation, ReadPrompt

router = APIRouter(prefix="/v1", tags=["linking"], route_class=BodyRoute)


class NumberParameter(ResponseBody):
    """A number in a policy's name, written behind ``prefix``; ``meaning`` is its unit. A
    ``default`` of null means that there is none."""

    name: str
    meaning: str
    type: Literal["integer", "number"]
    minimum: float
    maximum: float
    prefix: str
    default: float | None


class ChoiceParameter(ResponseBody):
    """One of several words in a policy's name."""

    name: str
    meaning: str
    type: Literal["choice"]
    values: list[str]
    default: str | None


class PolicyObject(ResponseBody):
    """A linking policy; ``usage`` is how its name is written with its parameters.

    ``supported`` is true if this engine can follow it, with some of its parameters at least.
    ``restriction`` is the reason for parameters, or a policy, that it cannot follow.
    """

    object: Literal["policy"]
    name: str
    usage: str
    description: str
    supported: bool
    restriction: str | None
    parameters: list[Annotated[NumberParameter | ChoiceParameter, Field(discriminator="type")]]


class MeasuredPolicy(ResponseBody):
    """The measurements of a policy with the model, in the terms of ``bench quality``."""

    policy: str
    answer_kl: float
    agreement: float
    recomputed: float
    prompts: int
    tokens: int


class ChosenPolicy(ResponseBody):
    """How the default policy is chosen: the first of those ``measured`` whose ``answer_kl`` is at
    most ``target``, else full."""

    target: float
    measured: list[MeasuredPolicy]
    """From the cheapest; empty until they are measured."""


class PolicyList(ResponseBody):
    """All linking policies. ``default`` is the policy of requests that name none. ``auto`` is how
    that is chosen; it is null where the settings name a policy."""

    object: Literal["list"]
    data: list[PolicyObject]
    default: str
    auto: ChosenPolicy | None


class ExplainRequest(RequestBody):
    """One of ``messages``, as a chat has them, and ``prompt``, as a completion has it; and how to
    link."""

    refuses_unknown: ClassVar[bool] = True

    model: Text | None = None
    messages: list[MessageBody] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES)
    documents: list[DocumentBody] | None = Field(default=None, max_length=MOST_DOCUMENTS)
    tools: list[ToolBody] | None = Field(default=None, max_length=MOST_TOOLS)
    prompt: PromptBody | None = None
    link: LinkOptions | None = None

    def check(self) -> None:
        if (self.messages is None) == (self.prompt is None):
            raise InvalidRequestError(
                "Give exactly one of 'messages' and 'prompt'.", param="messages"
            )
        if self.tools and self.messages is None:
            raise InvalidRequestError("'tools' go with 'messages' only.", param="tools")


class PromptExplanation(LinkExplanation):
    """The link of a prompt, and the model for which it is made."""

    model: str


@router.get("/policies", response_model=PolicyList)
async def list_policies(served: ServedModelParam, tenant: TenantParam) -> Response:
    """List all linking policies with their parameters, and the one for requests that name none."""
    data = [{"object": "policy", **policy} for policy in served.llm.policies()]
    auto = served.llm.policy_manager.auto
    return JSONResponse(
        {
            "object": "list",
            "data": data,
            "default": served.llm.default_policy(tenant).name,
            "auto": None
            if auto is None
            else {"target": auto.target, "measured": [asdict(each) for each in auto.figures]},
        }
    )


@router.post(
    "/link/explain", response_model=PromptExplanation, responses=error_responses(400, 404, 429, 503)
)
async def explain_link(
    body: ExplainRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Return tokens, segments, recomputed tokens by layer, scores and cost of linking ``messages``
    or a ``prompt``; no answer."""
    served.check_model(body.model)
    with blaming("prompt" if body.messages is None else "messages"):
        explaining, read = await served.encoding.run(request, lambda: _begin(served, body, tenant))
        explanation = await cancel_on_disconnect(asyncio.wrap_future(explaining), request.receive)

    def tell() -> dict[str, Any]:
        return served.llm.described(explanation, read).to_json()

    return JSONResponse(await run_in_threadpool(tell) | {"model": served.llm.model_name})


def _begin(
    served: ServedModel, body: ExplainRequest, tenant: str
) -> tuple[Future[Explanation], ReadPrompt]:
    link = body.link or NO_LINK_OPTIONS
    messages = body.messages
    return served.llm.begin_explain(
        None if messages is None else [message.message() for message in messages],
        documents=[document.document() for document in body.documents or ()],
        options=TemplateOptions(tools=template_tools(body.tools)),
        prompt=None if body.prompt is None else single_prompt(body.prompt),
        policy=link.policy,
        implicit=link.implicit,
        attention=bool(link.attention),
        tenant=tenant,
    )
