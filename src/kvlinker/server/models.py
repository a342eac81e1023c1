"""The model that an app serves, as all routes reach it; GET /v1/models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Request

from kvlinker.config import Settings
from kvlinker.errors import ModelNotFoundError
from kvlinker.llm import LLM
from kvlinker.server.bodies import ResponseBody
from kvlinker.server.errors import error_responses
from kvlinker.server.metrics import Metrics
from kvlinker.server.threads import EncodingThreads

router = APIRouter(prefix="/v1/models", tags=["models"])


@dataclass(frozen=True, slots=True)
class Service:
    """One model, as one app serves it."""

    llm: LLM
    settings: Settings
    metrics: Metrics
    encoding: EncodingThreads = field(default_factory=EncodingThreads)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFoundError unless a request's ``model`` is the served name, ``default`` or absent."""
        if name not in (None, "default", self.llm.model_name):
            raise ModelNotFoundError(
                f"The model {name!r} is not served here. Use {self.llm.model_name!r}, or leave 'model' out.",
                param="model",
            )


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


ServiceParam = Annotated[Service, Depends(_service)]


class ModelObject(ResponseBody):
    """A model that is served. ``max_model_len``: tokens that prompt and answer may have together."""

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
async def list_models(service: ServiceParam) -> ModelList:
    """The one model that is served."""
    return ModelList(data=[_model(service)])


@router.get("/{name:path}", responses=error_responses(404))
async def read_model(name: str, service: ServiceParam) -> ModelObject:
    """The model of this name."""
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> ModelObject:
    return ModelObject(
        id=service.llm.model_name, created=int(service.llm.created_at), max_model_len=service.llm.max_model_len
    )
