"""/v1/context_caches: a module for each kind of request, and one router for the application."""

from fastapi import APIRouter

from kvlinker.doors.http.context_caches import (
    creation,
    extraction,
    resource,
    splitting,
    texts,
    usage,
)

router = APIRouter()
# names such as "usage" before any id
for part in (creation, extraction, splitting, texts, usage, resource):
    router.include_router(part.router)
