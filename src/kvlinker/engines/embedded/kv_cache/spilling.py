"""Decides which of the KV that is evicted from the pool goes to disk, and copies it out of the pool
and back into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvlinker.engines.embedded.kv_cache.paths import Positions
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.prompting.segments import Range, ranges
from kvlinker.store.loading.arriving import KV
from kvlinker.store.prefixes import SpilledPrefixes

ComputeSeconds = Callable[[Sequence[Range]], float | None]
"""Predicts the seconds of computing these positions; None if nothing was measured."""


class PoolSpill:
    """Copies KV between the pool and files, which may lose any at any time. All methods but
    ``contains`` and ``pays`` are for the engine's thread.

    Copying takes as long as it takes to read memory, which is little compared with the computation
    that the slots are needed for, and no more is copied than may wait to be written.
    """

    def __init__(
        self,
        files: SpilledPrefixes,
        pool: KVPool,
        seconds: ComputeSeconds,
        *,
        fingerprint: str,
        token_bytes: int,
    ) -> None:
        """``fingerprint`` is that of the model, ``token_bytes`` are those of one token's KV."""
        self.fingerprint = fingerprint
        self._files = files
        self._pool = pool
        self._seconds = seconds
        self._token_bytes = token_bytes

    def pays(self, own: Positions) -> bool:
        """Return whether reading the KV of these positions is expected to be quicker than computing
        it."""
        return self._files.pays(len(own) * self._token_bytes, compute_seconds(self._seconds, own))

    def write(self, key: str, spans: Sequence[SlotSpan]) -> bool:
        """Keep the KV in these slots under the key; False if it cannot be kept."""
        if self._files.contains(key):
            return True
        nbytes = sum(span.size for span in spans) * self._token_bytes
        return self._files.takes(nbytes) and self._files.add(key, self._pool.read(spans))

    def contains(self, key: str) -> bool:
        """Return whether the KV is there."""
        return self._files.contains(key)

    def fits(self, tokens: int) -> bool:
        """Return whether there is room on disk for the KV of ``tokens`` tokens, if no other is
        kept."""
        return tokens * self._token_bytes <= self._files.budget_bytes

    def touch(self, key: str) -> None:
        """Note a use of the KV."""
        self._files.touch(key)

    def flush(self, deadline: float | None = None) -> None:
        """Wait until all is on disk, or the ``deadline``, on the monotonic clock, is over."""
        self._files.flush(deadline)

    def drop_waiting(self) -> None:
        """Keep no KV that is not on disk yet."""
        self._files.drop_waiting()

    @property
    def note(self) -> bytes | None:
        """The description of the KV that an earlier process left; None if there is none."""
        return self._files.note

    def leave(self, note: bytes) -> None:
        """Leave the KV to the next process that computes alike, with a note of what it is of.
        Raises OSError."""
        self._files.leave(note)

    def restore(self, kv: KV, first: int, last: int, slots: Positions) -> None:
        """Copy the tokens [first, last) of the KV into as many slots."""
        self._pool.write(kv, first, last, slots)


def compute_seconds(predict: ComputeSeconds, own: Positions) -> float:
    """Return the predicted seconds of computing these positions; infinity where nothing was
    measured."""
    computed = np.zeros(int(own.max(initial=-1)) + 1, dtype=np.bool_)
    computed[own] = True
    seconds = predict(ranges(computed))
    return math.inf if seconds is None else seconds
