"""``/v1/residency``: which chunks are in this server's memory, and how busy it is, for routers."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Query

from kvlinker.base.errors import PermissionDeniedError
from kvlinker.doors.http.edge.access import CallerParam
from kvlinker.doors.http.edge.errors import error_responses
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.models import ServedModelParam

COSTED_TOKENS = 512
"""The tokens of a prompt by whose time the cost of a missing token is told."""

router = APIRouter(prefix="/v1/residency", tags=["status"])


class ResidencyBody(ResponseBody):
    """Which chunks are in memory: everything (``whole``), or what changed since the report that was
    named.

    ``resident`` gives the names of each chunk, by chunk key: ids of context caches, and digests of
    texts with their tenant. ``running`` and ``waiting`` count requests; ``seconds_per_token`` is
    the time to compute one token of a prompt, null where it was not measured yet; ``keyed`` tells
    whether tenants have keys, and ``pid`` is the server's process.
    """

    epoch: str
    number: int
    whole: bool
    resident: dict[str, tuple[str, ...]]
    gone: tuple[str, ...]
    running: int
    waiting: int
    seconds_per_token: float | None
    keyed: bool
    pid: int


@router.get("", responses=error_responses(403))
def residency(
    served: ServedModelParam,
    caller: CallerParam,
    epoch: Annotated[str | None, Query(max_length=64)] = None,
    after: Annotated[int, Query(ge=0)] = 0,
) -> ResidencyBody:
    """Tell which chunks are in memory, or what changed since report ``after`` of ``epoch``. For
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
        resident=dict(report.resident),
        gone=report.gone,
        running=load.running,
        waiting=load.waiting,
        seconds_per_token=None if seconds is None else seconds / COSTED_TOKENS,
        keyed=bool(served.settings.accepted_keys),
        pid=os.getpid(),
    )
