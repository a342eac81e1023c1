"""Decides between two layers of a step which requests leave it, because their chunks are still
being read.

Before each decoder layer, ``ForwardPass.enter_layer`` asks here who has to leave. A request whose
chunk lacks the layer leaves the step, and the others go on without it; ``Scheduler.restart_later``
has it begin again once that layer and half of those after it have arrived (``ArrivingKV``). If all
lack it, the step waits. A request whose chunk is lost is loaded again: the chunk is computed then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.store.loading.arriving import ArrivingKV

WaitInStep = Callable[[Callable[[], bool]], None]
"""Waits until its argument returns true, or until a request outside the step could be computed:
``Scheduler.wait_in_step``."""


def never_wait(came: Callable[[], bool]) -> None:
    """Return at once, as if another request could be computed."""


def late_owners(batch: Batch, index: int, wait: WaitInStep) -> set[object]:
    """Return the owners that are to leave the batch before layer ``index`` of KV is attended to,
    since their chunks lack it; none once all have it. If all lack it and no other request can be
    computed, wait for it first."""
    while lacking := _lacking(batch, index):
        late = {owner for owner, _ in lacking}
        lost = {owner for owner, kv in lacking if kv.lost}
        if late != batch.owners:
            return late
        if lost:
            return lost
        came = partial(_came, index, lacking)
        wait(came)
        if not came():
            return late
    return set()


def _lacking(batch: Batch, index: int) -> list[tuple[object, ArrivingKV]]:
    """Return the owners that see KV whose layer has not arrived, each with the KV."""
    return [
        (owner, chunk.kv)
        for owner, chunk in batch.shared
        if isinstance(chunk.kv, ArrivingKV) and chunk.kv.layer(index) is None
    ]


def _came(index: int, lacking: Sequence[tuple[object, ArrivingKV]]) -> bool:
    """Return whether any of them has the layer now, or never will."""
    return any(kv.layer(index) is not None or kv.lost for _, kv in lacking)
