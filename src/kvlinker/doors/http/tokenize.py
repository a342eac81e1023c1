"""POST /tokenize and /detokenize: token ids as a request would have them, for budgets and for
debugging, and the texts of token ids."""

from __future__ import annotations

from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.limits import MOST_DOCUMENTS, MOST_MESSAGES, MOST_TOOLS
from kvlinker.base.types.messages import TemplateOptions
from kvlinker.doors.http.answers.chat import DocumentBody, MessageBody
from kvlinker.doors.http.answers.completions import PromptBody, single_prompt
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.guards import TenantParam
from kvlinker.doors.http.fields.bodies import (
    JsonObject,
    RequestBody,
    ResponseBody,
    Text,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.fields.generation import NO_LINK_OPTIONS, LinkOptions
from kvlinker.doors.http.fields.tools import ToolBody, template_tools
from kvlinker.doors.http.models import BodyRoute, ServedModel, ServedModelParam
from kvlinker.llm import Prompt

router = APIRouter(tags=["models"], route_class=BodyRoute)


class TokenizeRequest(RequestBody):
    """One of: ``text``, encoded as it is; ``prompt``, as a completion has it; ``messages``, as a
    chat has them, with ``documents`` and ``tools``. ``link`` says which texts of the latter two
    become chunks, whose seams the tokens show. ``add_special_tokens`` is as in a completion for a
    ``prompt``, and off for the others; a chat template adds its own."""

    place: ClassVar[Place | None] = Place.TOKENIZE
    model: Text | None = None
    text: Text | None = None
    prompt: PromptBody | None = None
    messages: list[MessageBody] | None = Field(default=None, min_length=1, max_length=MOST_MESSAGES)
    documents: list[DocumentBody] | None = Field(default=None, max_length=MOST_DOCUMENTS)
    tools: list[ToolBody] | None = Field(default=None, max_length=MOST_TOOLS)
    link: LinkOptions | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        given = [name for name in ("text", "prompt", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidRequestError(
                "Give exactly one of 'text', 'prompt' and 'messages'.",
                param=given[1] if given else "text",
            )
        if self.tools and self.messages is None:
            raise InvalidRequestError("'tools' go with 'messages' only.", param="tools")
        if self.add_special_tokens and self.messages is not None:
            raise InvalidRequestError(
                "The chat template adds special tokens: 'add_special_tokens' cannot be combined"
                " with 'messages'.",
                param="add_special_tokens",
            )


class TokenizeAnswer(ResponseBody):
    """Token ids, their number, and the most tokens that prompt and answer may have together.
    ``token_strs`` are their texts in the vocabulary, if the request asks for them."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to decode."""

    place: ClassVar[Place | None] = Place.DETOKENIZE

    model: Text | None = None
    tokens: list[int]


class DetokenizeAnswer(ResponseBody):
    """The text of token ids, special tokens included."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeAnswer, responses=error_responses(400, 404))
async def tokenize(
    body: TokenizeRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Return the ids of a ``text`` as a chunk has them, of a ``prompt`` or of ``messages``.

    They may be more than the context window takes, but texts that are far too long for it are
    refused.
    """
    served.check_model(body.model)
    served.report_ignored(body, request.scope)
    tokens = await served.encoding.run(request, lambda: _token_ids(served, body, tenant))
    note_tokens(request.scope, len(tokens))
    llm = served.llm
    answer = TokenizeAnswer(
        tokens=tokens,
        count=len(tokens),
        max_model_len=llm.max_model_len,
        token_strs=llm.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None,
    )
    return JSONResponse(answer.model_dump())


@router.post("/detokenize", responses=error_responses(400, 404))
async def detokenize(
    body: DetokenizeRequest, request: Request, served: ServedModelParam
) -> DetokenizeAnswer:
    """Return the text of token ids, special tokens included."""
    served.check_model(body.model)
    served.report_ignored(body, request.scope)
    text = await served.encoding.run(request, lambda: served.llm.decode_ids(body.tokens))
    return DetokenizeAnswer(prompt=text)


def _token_ids(served: ServedModel, body: TokenizeRequest, tenant: str) -> list[int]:
    llm, link = served.llm, body.link or NO_LINK_OPTIONS
    if body.text is not None and not body.add_special_tokens:
        return list(llm.token_ids(body.text))
    how: dict[str, Any] = {
        "policy": link.policy,
        "implicit": link.implicit,
        "keeps": False,
        "tenant": tenant,
    }
    if body.messages is not None:
        messages = [message.message() for message in body.messages]
        documents = [document.document() for document in body.documents or ()]
        options = TemplateOptions(
            tools=template_tools(body.tools),
            variables=body.chat_template_kwargs or {},
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )
        return _ids(llm.read_chat(messages, documents=documents, options=options, **how).prompt)
    given = single_prompt((body.prompt or "") if body.text is None else body.text)
    how["special_tokens"] = body.add_special_tokens is not False
    return _ids(llm.read_completion(given, **how).prompt)


def _ids(prompt: Prompt) -> list[int]:
    ids: list[int] = prompt.tokens.tolist()
    return ids
