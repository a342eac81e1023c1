"""GET /v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvlinker.server.service import Service, ServiceParam

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
async def list_models(service: ServiceParam) -> dict[str, Any]:
    return {"object": "list", "data": [_model(service)]}


@router.get("/{name:path}")
async def read_model(name: str, service: ServiceParam) -> dict[str, Any]:
    service.check_model(name)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.llm.model_name,
        "object": "model",
        "created": int(service.llm.created_at),
        "owned_by": "kvlinker",
        "max_model_len": service.llm.max_model_len,
    }
