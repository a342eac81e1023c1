"""The server's state: /health and /live for probes, /metrics for Prometheus, /status for people."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from psutil import Process

from kvlinker.doors.http.edge.guards import CallerParam
from kvlinker.doors.http.fields.bodies import ResponseBody
from kvlinker.doors.http.fields.server_status import (
    PromptTokenCounts,
    RequestCounts,
    ServerStatus,
    SlotCounts,
    TierStatus,
)
from kvlinker.doors.http.models import ServedModelParam
from kvlinker.engines.contract.cost import ChunkSize

router = APIRouter(tags=["status"])


class Health(ResponseBody):
    """The server's readiness for requests."""

    status: Literal["ok", "loading", "draining", "engine failed"]


class Liveness(ResponseBody):
    """The server runs."""

    status: Literal["alive"] = "alive"


class Version(ResponseBody):
    """The version of kvlinker."""

    version: str


_UNHEALTHY: dict[int | str, dict[str, Any]] = {
    503: {
        "model": Health,
        "description": (
            "The server loads its model, is shutting down, or its engine has failed: ask another."
        ),
    }
}


@router.get("/health", responses=_UNHEALTHY)
async def health(served: ServedModelParam, response: Response) -> Health:
    """Check whether the server takes requests: 503 while it loads its model, from the signal to
    stop on, and once the engine has failed."""
    if served.llm.healthy and not served.drain.began:
        return Health(status="ok")
    response.status_code = 503
    return Health(status="draining" if served.drain.began else "engine failed")


@router.get("/ping", responses=_UNHEALTHY)
async def ping(served: ServedModelParam, response: Response) -> Health:
    """Answer as ``/health`` does, under another name."""
    return await health(served, response)


@router.get("/version")
async def read_version() -> Version:
    """Return the version of kvlinker."""
    return Version(version=version("kvlinker"))


@router.get("/live")
async def live() -> Liveness:
    """Check that the server runs, also while it finishes its last requests."""
    return Liveness()


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(served: ServedModelParam) -> Response:
    """Return all metrics in Prometheus' text format."""
    return Response(
        await run_in_threadpool(served.metrics.exposition), media_type=CONTENT_TYPE_PLAIN_0_0_4
    )


@router.get("/status")
def status(served: ServedModelParam, caller: CallerParam) -> ServerStatus:
    """Return the page's figures. Runs in the thread pool, since a remote tier may answer slowly."""
    llm = served.llm
    load, bandwidths, places = llm.current_load(), llm.bandwidths(), llm.store.places()
    size = ChunkSize.of(llm.engine.kv_bytes)
    whose = None if caller.admin else caller.tenant
    return ServerStatus(
        model=llm.model_name,
        parameters=llm.engine.parameters,
        memory_bytes=Process().memory_info().rss,
        max_model_len=llm.max_model_len,
        policy=llm.default_policy().name,
        started_at=int(llm.created_at),
        requests=RequestCounts(
            running=load.running, waiting=load.waiting, finished=served.metrics.finished()
        ),
        kv_slots=SlotCounts(used=load.slots_used, total=load.slots_total),
        prompt_tokens=PromptTokenCounts(**served.metrics.prompt_tokens()),
        reusable_tokens=served.recent.reusable,
        output_tokens=served.metrics.output_tokens(),
        prefill_tokens_per_second=llm.prefill_rate(),
        kv_bytes_per_token=size.per_token,
        kv_bytes_per_chunk=size.per_chunk,
        disk_codec=served.settings.disk_codec,
        steps=llm.engine.computes_steps,
        tiers=[
            TierStatus(
                name=tier.name,
                used_bytes=tier.used_bytes,
                budget_bytes=tier.budget_bytes,
                chunks=tier.chunks,
                bytes_per_second=bandwidths.get(tier.name),
                place=places.get(tier.name),
            )
            for tier in llm.tiers()
        ],
        running=served.recent.running(whose),
        recent=served.recent.of(whose),
    )
