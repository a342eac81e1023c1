"""Expired context caches are deleted by a task of the server's."""

from __future__ import annotations

import asyncio
import logging

from fastapi.concurrency import run_in_threadpool

from kvlinker.context_caches import ContextCaches

INTERVAL_SECONDS = 5.0

logger = logging.getLogger(__name__)


async def sweep_forever(caches: ContextCaches, interval: float = INTERVAL_SECONDS) -> None:
    """Sweep until cancelled; a sweep that fails is logged and tried again."""
    while True:
        await asyncio.sleep(interval)
        try:
            await run_in_threadpool(caches.sweep)
        except Exception:
            logger.exception("Could not delete expired context caches; trying again in %s s", interval)
