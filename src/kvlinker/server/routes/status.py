"""What the server says of itself: /health for probes, /metrics for Prometheus, / and /status for people."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from kvlinker.server.metrics import CONTENT_TYPE
from kvlinker.server.service import ServiceParam

router = APIRouter(tags=["status"])

_PAGE = files("kvlinker.server").joinpath("static/index.html").read_text(encoding="utf-8")


@router.get("/", response_class=HTMLResponse)
async def page() -> HTMLResponse:
    """A page for people; it reads /status every few seconds."""
    return HTMLResponse(_PAGE)


@router.get("/health")
async def health(service: ServiceParam, response: Response) -> dict[str, str]:
    """503 once the engine has failed: restart the server."""
    if not service.llm.engine.healthy:
        response.status_code = 503
        return {"status": "engine failed"}
    return {"status": "ok"}


@router.get("/metrics")
async def metrics(service: ServiceParam) -> Response:
    return Response(await run_in_threadpool(service.metrics.exposition), media_type=CONTENT_TYPE)


@router.get("/status")
def status(service: ServiceParam) -> dict[str, Any]:
    """The page's figures. Runs in the thread pool: a remote tier may take its time to answer."""
    llm = service.llm
    load, bandwidths = llm.load(), llm.store.bandwidths.known()
    return {
        "model": llm.model_name,
        "max_model_len": llm.max_model_len,
        "policy": service.settings.policy,
        "started_at": int(llm.created_at),
        "requests": {"running": load.running, "waiting": load.waiting, "finished": service.metrics.finished()},
        "kv_slots": {"used": load.slots_used, "total": load.slots_total},
        "prompt_tokens": service.metrics.prompt_tokens(),
        "output_tokens": service.metrics.output_tokens(),
        "prefill_tokens_per_second": llm.prefill_rate(),
        "tiers": [
            {
                "name": tier.name,
                "used_bytes": tier.used_bytes,
                "budget_bytes": tier.budget_bytes,
                "chunks": tier.chunks,
                "bytes_per_second": bandwidths.get(tier.name),
            }
            for tier in llm.store.usage()
        ],
    }
