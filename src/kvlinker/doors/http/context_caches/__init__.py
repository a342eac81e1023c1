"""/v1/context_caches: a module for each thing that is asked of context caches, and one router for
the application."""

from fastapi import APIRouter

from kvlinker.doors.http.context_caches import creation, resource, splitting, texts, usage

router = APIRouter()
for part in (creation, splitting, texts, usage, resource):  # names such as "usage" before any id
    router.include_router(part.router)
