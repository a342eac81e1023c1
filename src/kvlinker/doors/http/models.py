"""The model that an app serves, as all routes reach it; GET /v1/models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends, Request

from kvlinker.base.errors import ModelNotFoundError
from kvlinker.doors.http.edge.draining import Drain
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.embedding_turns import EmbeddingTurns
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.metrics import Metrics
from kvlinker.doors.http.tracing import Tracing
from kvlinker.llm import LLM
from kvlinker.settings import Settings

router = APIRouter(prefix="/v1/models", tags=["models"])

T = TypeVar("T")

LONG_TEXT_BYTES = 256 * 2**10
"""The length of a body from which on its texts take noticeable time and memory to encode."""

LONG_AT_ONCE = 2
"""The most requests with long texts that are encoded at the same time."""


class EncodingThreads:
    """Runs functions that encode a request's texts: those of short texts in the threads that all
    routes share, those of long ones a few at a time in threads of their own."""

    def __init__(self) -> None:
        self._long = anyio.CapacityLimiter(LONG_AT_ONCE)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Return the result of ``function``, for a request whose body has been read."""
        if len(await request.body()) >= LONG_TEXT_BYTES:
            return await self.run_long(function)
        return await anyio.to_thread.run_sync(function)

    async def run_long(self, function: Callable[[], T]) -> T:
        """Return the result of ``function``, which takes long whatever the body's length."""
        return await anyio.to_thread.run_sync(function, limiter=self._long)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Holds one model, as one app serves it."""

    llm: LLM
    settings: Settings
    metrics: Metrics
    drain: Drain
    embedding: EmbeddingTurns
    body_limits: Mapping[str, int]
    """The most bytes of bodies, by path, where these are fewer than ``MAX_BODY_BYTES``."""
    tracing: Tracing | None
    encoding: EncodingThreads = field(default_factory=EncodingThreads)

    @property
    def embedding_name(self) -> str | None:
        """The embedding model's name; None if there is none."""
        return None if self.llm.embedder is None else self.llm.embedder.name

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless a request's ``model`` is one of the served names,
        ``default`` or absent."""
        if name not in (None, "default", *self.settings.served_names):
            raise ModelNotFoundError(
                f"The model {name!r} is not served here. Use {self.llm.model_name!r}, or leave"
                " 'model' out.",
                param="model",
            )


async def _service(request: Request) -> ServedModel:
    served: ServedModel = request.app.state.served
    return served


ServedModelParam = Annotated[ServedModel, Depends(_service)]


class ModelObject(ResponseBody):
    """A model that is served. ``max_model_len``: tokens that prompt and answer may have
    together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["kvlinker"] = "kvlinker"
    max_model_len: int


class ModelList(ResponseBody):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[ModelObject]


@router.get("")
async def list_models(served: ServedModelParam) -> ModelList:
    """List the model that is served, under each of its names, and the embedding model."""
    names = [*served.settings.served_names, *filter(None, [served.embedding_name])]
    return ModelList(data=[_model(served, name) for name in names])


@router.get("/{name:path}", responses=error_responses(404))
async def read_model(name: str, served: ServedModelParam) -> ModelObject:
    """Describe the model of this name."""
    if name != served.embedding_name:
        served.check_model(name)
    return _model(served, served.llm.model_name if name == "default" else name)


def _model(served: ServedModel, name: str) -> ModelObject:
    llm = served.llm
    answers = llm.embedder is None or name in served.settings.served_names
    window = llm.max_model_len if answers or not llm.embedder else llm.embedder.max_tokens
    return ModelObject(id=name, created=int(llm.created_at), max_model_len=window)
