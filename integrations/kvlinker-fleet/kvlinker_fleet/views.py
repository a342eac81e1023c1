"""Shows a fleet as one server: ``/status``, ``/metrics`` and ``/v1/audit`` of all replicas."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Annotated, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ValidationError

from kvlinker.base.errors import EngineClosedError, PermissionDeniedError
from kvlinker.doors.http.edge.guards import CallerParam
from kvlinker.doors.http.fields.audit import AuditObject
from kvlinker.doors.http.fields.server_status import (
    PromptTokenCounts,
    RequestCounts,
    ServerStatus,
    SlotCounts,
    TierStatus,
)
from kvlinker_fleet.audit import merge_reports
from kvlinker_fleet.backends import Backends, ReplicaState
from kvlinker_fleet.metrics import exposition
from kvlinker_fleet.router import Router

Answer = TypeVar("Answer", bound=BaseModel)


class ReplicaStatus(BaseModel):
    """How a replica is. Counts are those of its last report, ``pid`` and ``epoch`` null until there
    is one; ``role`` is the setting, as far as it is known; ``reason`` says why it gets no requests,
    and is null if it does."""

    id: str
    pid: int | None
    address: str
    role: str
    state: ReplicaState
    running: int
    waiting: int
    resident_chunks: int
    epoch: str | None
    reason: str | None


class Holders(BaseModel):
    """The ids of the replicas that have a chunk in memory, by its name."""

    replicas: dict[str, list[str]]


class FleetStatus(ServerStatus):
    """The state of all replicas together, in the format of a server, and of each of them."""

    replicas: list[ReplicaStatus]


def routes(router: Router, backends: Backends) -> APIRouter:
    """Return the routes that show the reports of ``backends``, and the state of ``router``."""
    shown = APIRouter()
    started_at = int(time.time())

    @shown.get("/status")
    async def status() -> FleetStatus:
        """Return the state of all replicas."""
        texts = await asyncio.gather(*(backends.text(each, "/status") for each in backends.ready()))
        return FleetStatus(
            **summed(read_answers(ServerStatus, texts), started_at).model_dump(),
            replicas=[
                ReplicaStatus(
                    id=each.id,
                    pid=each.pid,
                    address=each.url,
                    role=each.role,
                    state=each.state,
                    running=router.replicas[each.id].running,
                    waiting=router.replicas[each.id].waiting,
                    resident_chunks=router.replicas[each.id].chunks,
                    epoch=router.replicas[each.id].epoch,
                    reason=each.reason,
                )
                for each in backends.known.values()
            ],
        )

    @shown.get("/v1/residency/replicas")
    async def holders(
        caller: CallerParam, name: Annotated[list[str], Query(max_length=1000)]
    ) -> Holders:
        """Return which replicas have chunks in memory, by the names that requests use: ids of
        context caches. For admins: others must not learn whether an id exists."""
        if not caller.admin:
            raise PermissionDeniedError("Only admin keys may read /v1/residency/replicas.")
        now = time.monotonic()
        return Holders(replicas={each: router.holders(each, now) for each in name})

    @shown.get("/v1/audit")
    async def audit(request: Request) -> Response:
        """Return the findings of all audits; each caller sees what each server would show it."""
        key = {
            name: value
            for name in ("authorization", "x-api-key")
            if (value := request.headers.get(name)) is not None
        }
        answers = await asyncio.gather(
            *(backends.ask_as(key, each, "/v1/audit") for each in backends.ready())
        )
        responses = [answer for answer in answers if answer is not None]
        found = read_answers(AuditObject, (each.text for each in responses if each.is_success))
        if found:
            return JSONResponse(merge_reports(found).model_dump())
        if refused := [each for each in responses if not each.is_success]:
            first = refused[0]
            return Response(first.content, first.status_code, media_type="application/json")
        raise EngineClosedError(
            "Nobody can answer: no replica of this version is ready. Try again in a moment."
        )

    @shown.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics of all replicas that are ready, each with its label, and their
        sums."""
        asked = backends.ready()
        texts = await asyncio.gather(*(backends.text(each, "/metrics") for each in asked))
        texts_of = dict(zip((each.id for each in asked), texts, strict=True))
        return Response(exposition(texts_of), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return shown


def read_answers(kind: type[Answer], texts: Iterable[str]) -> list[Answer]:
    """Read servers' answers of a ``kind``, without those that are none: of other versions, or of
    what stands before a server."""
    answers = []
    for text in texts:
        with suppress(ValidationError):
            answers.append(kind.model_validate_json(text))
    return answers


def summed(statuses: Sequence[ServerStatus], started_at: int) -> ServerStatus:
    """Return the joint state of servers: sums of counts, lists of names that differ, the smallest
    of limits. Without servers, there is nothing since ``started_at``."""

    def names(values: Iterable[str]) -> str:
        return ", ".join(dict.fromkeys(values))

    rates = [each.prefill_tokens_per_second for each in statuses]
    known_rates = [rate for rate in rates if rate is not None]
    return ServerStatus(
        model=names(each.model for each in statuses),
        parameters=min((each.parameters for each in statuses), default=0),
        memory_bytes=sum(each.memory_bytes for each in statuses),
        max_model_len=min((each.max_model_len for each in statuses), default=0),
        policy=names(each.policy for each in statuses),
        started_at=min((each.started_at for each in statuses), default=started_at),
        requests=RequestCounts(
            running=sum(each.requests.running for each in statuses),
            waiting=sum(each.requests.waiting for each in statuses),
            finished=sum(each.requests.finished for each in statuses),
        ),
        kv_slots=SlotCounts(
            used=sum(each.kv_slots.used for each in statuses),
            total=sum(each.kv_slots.total for each in statuses),
        ),
        prompt_tokens=PromptTokenCounts(
            cached=sum(each.prompt_tokens.cached for each in statuses),
            recomputed=sum(each.prompt_tokens.recomputed for each in statuses),
            fresh=sum(each.prompt_tokens.fresh for each in statuses),
        ),
        reusable_tokens=sum(each.reusable_tokens for each in statuses),
        output_tokens=sum(each.output_tokens for each in statuses),
        prefill_tokens_per_second=sum(known_rates) if known_rates else None,
        kv_bytes_per_token=max((each.kv_bytes_per_token for each in statuses), default=0),
        kv_bytes_per_chunk=max((each.kv_bytes_per_chunk for each in statuses), default=0),
        disk_codec=names(each.disk_codec for each in statuses),
        steps=names(each.steps for each in statuses),
        tiers=_tiers([tier for each in statuses for tier in each.tiers]),
    )


def _tiers(tiers: Sequence[TierStatus]) -> list[TierStatus]:
    """Return the tiers by name, those that several servers share once."""
    joined = []
    for name in dict.fromkeys(tier.name for tier in tiers):
        places: dict[str | int, TierStatus] = {}
        for number, tier in enumerate(tiers):
            if tier.name == name:
                places[number if tier.place is None else tier.place] = tier
        rates = [tier.bytes_per_second for tier in tiers if tier.name == name]
        known_rates = [rate for rate in rates if rate is not None]
        joined.append(
            TierStatus(
                name=name,
                used_bytes=sum(tier.used_bytes for tier in places.values()),
                budget_bytes=sum(tier.budget_bytes for tier in places.values()),
                chunks=sum(tier.chunks for tier in places.values()),
                bytes_per_second=min(known_rates, default=None),
                place=next(iter(places.values())).place if len(places) == 1 else None,
            )
        )
    return joined
