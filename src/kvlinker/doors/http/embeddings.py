"""POST /v1/embeddings: vectors of texts, in OpenAI's form."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from numpy.typing import NDArray
from pydantic import Discriminator, Field, Tag, field_validator

from kvlinker.base.errors import InvalidRequestError, ModelNotFoundError
from kvlinker.base.types.limits import MOST_EMBEDDED
from kvlinker.doors.http.edge.access_log import note_tokens
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.guards import TenantParam, cancel_on_disconnect
from kvlinker.doors.http.fields.bodies import (
    NonemptyText,
    RequestBody,
    ResponseBody,
    Text,
)
from kvlinker.doors.http.fields.foreign import Place
from kvlinker.doors.http.models import BodyRoute, ServedModelParam
from kvlinker.service.embedding import embedder_of

router = APIRouter(prefix="/v1", tags=["embeddings"], route_class=BodyRoute)

_SEVERAL = Field(min_length=1, max_length=MOST_EMBEDDED)


def _input_kind(value: Any) -> str | None:
    """Return the tag of an input's form; None for none."""
    return "<text>" if isinstance(value, str) else "<texts>" if isinstance(value, list) else None


InputBody = Annotated[
    Annotated[NonemptyText, Tag("<text>")]
    | Annotated[list[NonemptyText], _SEVERAL, Tag("<texts>")],
    Discriminator(
        _input_kind,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a text, or a list of texts",
    ),
]


class EmbeddingsRequest(RequestBody):
    """Texts, each of which gets a vector of length 1: of all ``dimensions``, or the first ones.
    ``base64`` holds little-endian 32-bit floats."""

    place: ClassVar[Place | None] = Place.EMBEDDINGS

    input: InputBody
    model: Text | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_texts(cls, value: Any) -> Any:
        """Refuse token ids: clients that send some have them from the tokenizer of OpenAI's models,
        which numbers tokens in its own way."""
        if isinstance(value, list) and value and isinstance(value[0], int | list):
            raise InvalidRequestError(
                "'input' has token ids, which mean other tokens to this model than to OpenAI's:"
                " send texts. LangChain's OpenAIEmbeddings does with"
                " check_embedding_ctx_length=False.",
                param="input",
            )
        return value


class EmbeddingObject(ResponseBody):
    """The vector of the input at ``index``."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(ResponseBody):
    """The tokens that the embedding model read."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(ResponseBody):
    """The vectors of all inputs, in their order."""

    object: Literal["list"] = "list"
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


@router.post(
    "/embeddings", response_model=EmbeddingList, responses=error_responses(400, 404, 429, 503)
)
async def create_embeddings(
    body: EmbeddingsRequest, request: Request, served: ServedModelParam, tenant: TenantParam
) -> Response:
    """Return the vectors of texts, by the server's embedding model."""
    embedder = embedder_of(served.llm.embedder)
    if body.model not in (None, "default", embedder.name):
        raise ModelNotFoundError(
            f"The model {body.model!r} makes no embeddings here. Use {embedder.name!r}, or leave"
            " 'model' out.",
            param="model",
        )
    served.report_ignored(body, request.scope)
    embedder.check_dimensions(body.dimensions)
    with served.embedding.request():
        asked = await served.encoding.run(request, lambda: embedder.prepare(_texts(body.input)))
        embedding = served.embedding.embed(embedder, asked, tenant)
        vectors = await cancel_on_disconnect(embedding, request.receive)
    note_tokens(request.scope, asked.tokens)

    def tell() -> str:
        cut = embedder.cut(vectors, body.dimensions)
        data = [_object(index, vector, body.encoding_format) for index, vector in enumerate(cut)]
        usage = EmbeddingUsage(prompt_tokens=asked.tokens, total_tokens=asked.tokens)
        return EmbeddingList(data=data, model=embedder.name, usage=usage).model_dump_json()

    return Response(await run_in_threadpool(tell), media_type="application/json")


def _texts(given: InputBody) -> Sequence[str]:
    return [given] if isinstance(given, str) else given


def _object(
    index: int, vector: NDArray[np.float32], form: Literal["float", "base64"] | None
) -> EmbeddingObject:
    if form == "base64":
        return EmbeddingObject(
            index=index, embedding=base64.b64encode(vector.astype("<f4").tobytes()).decode()
        )
    return EmbeddingObject(index=index, embedding=vector.tolist())
