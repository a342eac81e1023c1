"""Reads chunks from slower tiers layer by layer: a prompt's first layers compute while its last ones are read."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvlinker.store.loading.bandwidth import Bandwidths
from kvlinker.store.loading.joined_reader import UnderWay
from kvlinker.store.loading.load_job import LoadJob
from kvlinker.store.loading.reader_threads import ReaderThreads
from kvlinker.store.loading.wanted import Urgency, Wanted

THREADS = 2


class LayerLoader:
    """A few threads that read. The chunks of a prompt are dealt out among them, and advance together: each thread reads
    layer i of all its chunks before layer i + 1 of any. What is being read for one prompt already is not read again for
    another."""

    def __init__(self, bandwidths: Bandwidths | None = None) -> None:
        self.bandwidths = bandwidths or Bandwidths()
        self._threads = ReaderThreads(THREADS)
        self._under_way = UnderWay()
        self._closing = threading.Event()

    def worth_loading(self, tier: str, nbytes: int, urgency: Urgency) -> bool:
        """Whether reading is expected to take no longer than computing would; yes where that is not known, or is
        decided."""
        rate = self.bandwidths.of(tier)
        if urgency.decided or rate is None or not self.bandwidths.fresh(tier):
            return True
        return nbytes / rate <= max(urgency.prefill, 1e-3)

    def load(self, wanted: Sequence[Wanted], urgency: Urgency) -> None:
        """Begin to read the chunks of one prompt. Those that cannot be placed by the time in which they could have
        been computed are given up."""
        job = LoadJob(wanted, urgency, self._threads, self.bandwidths, self._under_way, self._closing, parts=THREADS)
        job.start()

    def close(self) -> None:
        """Read no further; what is not there by now is lost. Idempotent."""
        self._closing.set()
        self._threads.close()
