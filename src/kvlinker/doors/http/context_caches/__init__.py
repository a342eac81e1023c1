"""/v1/context_caches: one router for the application."""

from fastapi import APIRouter

from kvlinker.doors.http.context_caches import caches, texts

router = APIRouter()
# names such as "search" before any id
for part in (texts, caches):
    router.include_router(part.router)
