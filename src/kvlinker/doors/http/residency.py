"""Routes between servers: ``/v1/residency``, which chunks this server has, and how busy it is, for
routers; ``/v1/chunks/build``, to compute chunks for servers that share the catalog and a tier."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Query
from pydantic import Field, StringConstraints

from kvlinker.base.errors import PermissionDeniedError
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.edge.guards import CallerParam
from kvlinker.doors.http.fields.bodies import RequestBody, ResponseBody
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.service.residency import COSTED_TOKENS

MOST_PRELOADED = 10_000
"""The most chunks of one request to preload."""

MOST_SECONDS = 600.0
"""The longest that a server may preload."""

ChunkKey = Annotated[str, StringConstraints(pattern=f"^{CHUNK_KEY.pattern}$")]

router = APIRouter(prefix="/v1", tags=["status"])


class ChunkPlaces(ResponseBody):
    """The tiers that have a chunk: the fastest of the server's own (``memory`` for all that needs
    no loading), and all shared ones; and the chunk's names: ids of context caches, and digests of
    texts with their tenant."""

    tiers: tuple[str, ...]
    names: tuple[str, ...]


class TierSpeed(ResponseBody):
    """The measured time to load one token, null if nothing was measured yet, and the name of the
    medium of a tier that servers share."""

    seconds_per_token: float | None
    place: str | None


class ResidencyBody(ResponseBody):
    """Which chunks the server has: all of them (``whole``), or the changes since the named report.

    ``chunks`` has them by chunk key. ``tiers`` has those that are slower than memory.
    ``seconds_per_token`` is the time to compute one token of a prompt, null if it was not measured
    yet; ``running`` and ``waiting`` count requests; ``keyed`` is true if tenants have keys,
    ``recognises`` if passages of plain texts become chunks (``implicit`` is ``auto`` or
    ``structure``). ``role`` is the setting: the server answers, or builds chunks for others.
    ``pending`` is the number of chunks still to preload, ``pid`` the server's process, and
    ``body_limits`` are the most bytes of bodies by path.
    """

    epoch: str
    number: int
    whole: bool
    chunks: dict[str, ChunkPlaces]
    gone: tuple[str, ...]
    tiers: dict[str, TierSpeed]
    running: int
    waiting: int
    seconds_per_token: float | None
    keyed: bool
    recognises: bool
    role: Literal["both", "build", "serve"]
    pending: int
    pid: int
    body_limits: dict[str, int]


@router.get("/residency", responses=error_responses(403))
def residency(
    served: ServedModelParam,
    caller: CallerParam,
    epoch: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> ResidencyBody:
    """Report which chunks this server has, or the changes since report ``after`` of ``epoch``. For
    admins: ids of all tenants are among the names."""
    if not caller.admin:
        raise PermissionDeniedError("Only admin keys may read /v1/residency.")
    llm = served.llm
    report, load = llm.residency.report(epoch, after), llm.current_load()
    seconds = llm.engine.prefill_seconds(COSTED_TOKENS)
    return ResidencyBody(
        epoch=report.epoch,
        number=report.number,
        whole=report.whole,
        chunks={
            key: ChunkPlaces(tiers=chunk.tiers, names=chunk.names)
            for key, chunk in report.chunks.items()
        },
        gone=report.gone,
        tiers={
            name: TierSpeed(seconds_per_token=cost.seconds_per_token, place=cost.place)
            for name, cost in llm.residency.costs().items()
        },
        running=load.running,
        waiting=load.waiting,
        seconds_per_token=None if seconds is None else seconds / COSTED_TOKENS,
        keyed=bool(served.settings.accepted_keys),
        pending=llm.preloading_chunks,
        recognises=served.settings.implicit in ("auto", "structure"),
        role=served.settings.role,
        pid=os.getpid(),
        body_limits=dict(served.body_limits),
    )


class PreloadBody(RequestBody):
    """The keys of chunks to load into memory, the most important ones first, and the seconds within
    which they may be loaded."""

    refuses_unknown: ClassVar[bool] = True

    chunks: Annotated[list[ChunkKey], Field(max_length=MOST_PRELOADED)]
    seconds: Annotated[float, Field(gt=0, le=MOST_SECONDS)] = 30.0


class PreloadAnswer(ResponseBody):
    """The number of chunks that are still to be loaded into memory. `GET /v1/residency` reports it,
    too."""

    pending: int


@router.post("/residency/preload", status_code=202, responses=error_responses(403))
def preload(body: PreloadBody, served: ServedModelParam, caller: CallerParam) -> PreloadAnswer:
    """Begin to load chunks from slower tiers, or to compute them again, as long as memory has room.
    Unknown keys are left out. For admins: the chunks may be any tenant's."""
    if not caller.admin:
        raise PermissionDeniedError("Only admin keys may preload chunks.")
    begin = served.llm.agents.preloading.begin
    return PreloadAnswer(pending=begin(body.chunks, body.seconds, tenant=caller.tenant))


class BuildRequest(RequestBody):
    """Names a chunk of the catalog by its key."""

    refuses_unknown: ClassVar[bool] = True

    key: ChunkKey


class BuiltChunk(ResponseBody):
    """A chunk whose KV, of ``bytes`` bytes, is in all tiers that accept it."""

    key: str
    bytes: int


@router.post("/chunks/build", responses=error_responses(400, 403, 404))
async def build(body: BuildRequest, served: ServedModelParam, caller: CallerParam) -> BuiltChunk:
    """Compute a chunk's KV, where no tier has it, and answer when the shared tiers have it. For
    admins, on servers whose ``role`` is not ``serve``."""
    if not caller.admin:
        raise PermissionDeniedError("Only admin keys may have chunks built.")
    if served.settings.role == "serve":
        raise PermissionDeniedError("This server builds no chunks for others: its role is serve.")
    nbytes = await asyncio.wrap_future(await asyncio.to_thread(served.llm.building.build, body.key))
    return BuiltChunk(key=body.key, bytes=nbytes)
