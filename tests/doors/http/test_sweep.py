"""Sweeps that fail are tried again, and told once: with a trace only where it is a bug."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from kvlinker.doors.http.app import sweep_forever
from kvlinker.store import StoreError


class Failing:
    """``ContextCaches``, as far as sweeping needs them."""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = list(errors)

    def sweep(self) -> int:
        error = self._errors.pop(0) if self._errors else None
        if error is not None:
            raise error
        return 0

    async def sweep_all(self) -> None:
        task = asyncio.create_task(sweep_forever(self, interval=0.001))  # type: ignore[arg-type]
        while self._errors:
            await asyncio.sleep(0.001)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_failures_of_the_store_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    full, gone = StoreError("full"), StoreError("gone")
    await Failing(full, full, full, gone, None, gone, None).sweep_all()
    assert [record.getMessage().rpartition(" ")[2] for record in caplog.records] == [
        "full",
        "gone",
        "gone",
    ]
    assert not any(record.exc_info for record in caplog.records)


async def test_bugs_have_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    await Failing(RuntimeError("bug"), None).sweep_all()
    (record,) = caplog.records
    assert record.exc_info
