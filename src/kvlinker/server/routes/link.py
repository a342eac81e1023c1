"""/v1/policies and /v1/link/explain: what policies there are, and what one does to a prompt."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.concurrency import run_in_threadpool

from kvlinker.linking import Explanation, known_policies
from kvlinker.server.bodies.link import ExplainBody
from kvlinker.server.routes.answering import errors_name
from kvlinker.server.service import Service, ServiceParam, TenantParam

router = APIRouter(prefix="/v1", tags=["linking"])


@router.get("/policies")
async def list_policies(service: ServiceParam) -> dict[str, Any]:
    """All linking policies with their parameters, and the one that requests get that name none."""
    data = [{"object": "policy", **policy.describe()} for policy in known_policies().values()]
    return {"object": "list", "data": data, "default": service.settings.policy}


@router.post("/link/explain")
async def explain_link(body: ExplainBody, service: ServiceParam, tenant: TenantParam) -> dict[str, Any]:
    """Segments, recomputed tokens by layer, scores and cost of linking ``messages`` or a ``prompt``; no answer."""
    service.check_model(body.model)
    explanation = await run_in_threadpool(_explain, service, body, tenant)
    return {"model": service.llm.model_name, **explanation.to_json()}


def _explain(service: Service, body: ExplainBody, tenant: str) -> Explanation:
    policy = body.link.policy if body.link else None
    if body.messages is not None:
        messages = [message.plain() for message in body.messages]
        with errors_name("messages", messages):
            return service.llm.explain(messages, policy=policy, tenant=tenant)
    prompt = body.plain_prompt()
    with errors_name("prompt", prompt):
        return service.llm.explain(prompt=prompt, policy=policy, tenant=tenant)
