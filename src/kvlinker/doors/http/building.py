"""``/v1/chunks/build``: computes chunks for other servers that share the catalog and a tier."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter
from pydantic import Field

from kvlinker.base.errors import PermissionDeniedError
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.doors.http.edge.access import CallerParam
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import RequestBody, ResponseBody
from kvlinker.doors.http.models import ServedModelParam

router = APIRouter(prefix="/v1/chunks", tags=["status"])


class BuildRequest(RequestBody):
    """Names a chunk of the catalog by its key."""

    key: Annotated[str, Field(pattern=f"^{CHUNK_KEY.pattern}$")]


class BuiltChunk(ResponseBody):
    """A chunk whose KV, of so many ``bytes``, is in all tiers that take it."""

    key: str
    bytes: int


@router.post("/build", responses=error_responses(400, 403, 404))
async def build(body: BuildRequest, served: ServedModelParam, caller: CallerParam) -> BuiltChunk:
    """Compute a chunk's KV, where no tier has it, and answer once the shared tiers have it. For
    admins, on servers whose ``role`` is not ``serve``."""
    if not caller.admin:
        raise PermissionDeniedError("Only admin keys may have chunks built.")
    if served.settings.role == "serve":
        raise PermissionDeniedError("This server builds no chunks for others: its role is serve.")
    nbytes = await asyncio.wrap_future(await asyncio.to_thread(served.llm.building.build, body.key))
    return BuiltChunk(key=body.key, bytes=nbytes)
