"""What the routes of one app share, and how they get at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from kvlinker.config import Settings
from kvlinker.errors import ModelNotFoundError
from kvlinker.llm import LLM
from kvlinker.server.access import Caller, caller_of
from kvlinker.server.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Service:
    """One model, as one app serves it."""

    llm: LLM
    settings: Settings
    metrics: Metrics

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFoundError unless a request's ``model`` is the served name, ``default`` or absent."""
        if name not in (None, "default", self.llm.model_name):
            raise ModelNotFoundError(
                f"The model {name!r} is not served here. Use {self.llm.model_name!r}, or leave 'model' out.",
                param="model",
            )


async def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


async def _tenant(request: Request) -> str:
    return caller_of(request).tenant


async def _caller(request: Request) -> Caller:
    return caller_of(request)


ServiceParam = Annotated[Service, Depends(_service)]
CallerParam = Annotated[Caller, Depends(_caller)]
TenantParam = Annotated[str, Depends(_tenant)]
