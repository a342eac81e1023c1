"""Expired context caches are deleted by a task of the server's."""

from __future__ import annotations

import asyncio
import logging

from fastapi.concurrency import run_in_threadpool

from kvlinker.context_caches import ContextCaches
from kvlinker.errors import KVLinkerError

INTERVAL_SECONDS = 5.0

logger = logging.getLogger(__name__)


async def sweep_forever(caches: ContextCaches, interval: float = INTERVAL_SECONDS) -> None:
    """Sweep until cancelled; a sweep that fails is tried again, and logged unless the one before failed alike."""
    known = None
    while True:
        await asyncio.sleep(interval)
        try:
            await run_in_threadpool(caches.sweep)
            known = None
        except KVLinkerError as error:
            if error.message != known:
                known = error.message
                logger.error("Expired context caches are not deleted for now: %s", error.message)
        except Exception:
            logger.exception("Expired context caches could not be deleted; trying again in %s s", interval)
