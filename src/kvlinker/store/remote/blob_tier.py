"""Keeps chunks in a remote medium of any kind: encodes, verifies and counts them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from kvlinker.base.errors import StoreError
from kvlinker.base.events import ChunkDamaged, ChunkEvicted, Events
from kvlinker.base.installing import install_command
from kvlinker.store.chunk_kv import ChunkKV, ChunkReader, LayerLostError
from kvlinker.store.format.byte_source import BufferSource, Bytes, ReadAheadSource
from kvlinker.store.format.chunk_file import TierReader, decode_chunk, encode_chunk, open_chunk
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.compression import UnreadableHereError
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.format.sealing import NOT_SEALED, Sealing
from kvlinker.store.loading.bandwidths import speed_name
from kvlinker.store.remote.medium import (
    KEYS_AT_ONCE,
    Blob,
    BlobDamaged,
    BlobMedium,
    MediumRefused,
    MediumUsage,
    WriteOutcome,
)
from kvlinker.store.remote.outages import ANSWER_SECONDS, PAUSE_SECONDS, GuardedMedium
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import TierCheck, check_key

logger = logging.getLogger(__name__)

EXCHANGE_SECONDS = ANSWER_SECONDS / 2
"""The time limit for one exchange of bytes with a medium, which is part of a call."""

AUDIT_SECONDS = 600.0
"""The time limit for what goes through all that a medium holds, for which no request waits; chosen
by hand."""

_NOTHING_WRITTEN = WriteOutcome(stored=False)


class BlobTier:
    """A tier that keeps each chunk as one blob, the bytes of a chunk file, in a medium that other
    servers may share.

    A chunk's size here is its blob's. Whatever the medium does, callers see hits and misses, and
    wait a bounded time; while it does not answer, they do not wait at all. Chunks whose deletion
    the medium did not take are tombstoned, and deleted when it answers again.
    """

    shared = True

    def __init__(
        self,
        name: str,
        medium: BlobMedium,
        events: Events,
        *,
        answer_seconds: float = ANSWER_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
        conceal: Callable[[str], str] = str,
        sealing: Sealing = NOT_SEALED,
        codec: Codec = RAW,
    ) -> None:
        """Open the medium, which need not answer. ``conceal`` removes credentials from its error
        messages."""
        self.name = name
        self.speed_name = speed_name(name, place=medium.place, codec=codec, sealing=sealing)
        self._medium = medium
        self._events = events
        self._sealing = sealing
        self._codec = codec
        self._guard = GuardedMedium(
            name,
            medium.place,
            self._reopen,
            events,
            answer_seconds=answer_seconds,
            pause_seconds=pause_seconds,
            conceal=conceal,
        )
        self._lock = threading.Lock()
        self._tombstoned: set[str] = set()
        self._last_usage = MediumUsage(0, 0)
        self._publish_evicted(self._guard.ask(medium.open, ()))

    @property
    def budget_bytes(self) -> int:
        return self._medium.budget_bytes

    @property
    def used_bytes(self) -> int:
        """The medium's own count, as last known while the medium does not answer."""
        return self._usage().used_bytes

    def get(self, key: str) -> ChunkKV | None:
        blob = self._find(self._medium.touch, key)
        kv = None if blob is None else self._read(key, blob)
        return kv if isinstance(kv, ChunkKV) else None

    def open(self, key: str) -> ChunkReader | None:
        blob = self._find(self._medium.touch, key)
        if blob is None or blob.nbytes > self.budget_bytes:
            return None
        failed = partial(self._note_failed_read, key)
        source = ReadAheadSource(
            blob.nbytes, partial(self._fetch_part, key, blob), ahead_bytes=self._medium.ahead_bytes
        )
        try:
            return TierReader(open_chunk(source, key, self._sealing), failed=failed)
        except LayerLostError:
            return None
        except UnreadableHereError as error:
            logger.warning("Chunk %s was not read from tier %s: %s", key, self.name, error)
            return None
        except Exception as error:
            failed(error)
            return None

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """Keep the KV as ``Tier.put`` does. Raises ValueError for KV that chunk files do not hold:
        a caller's mistake."""
        if self._find(self._medium.touch, key) is not None:
            return True
        if not self._guard.up:
            return False
        encoded = encode_chunk(key, kv, self._codec, rest)
        nbytes = self._sealing.nbytes(encoded.nbytes)
        if nbytes > self.budget_bytes:
            return False
        with self._lock:
            self._tombstoned.discard(key)
        pieces = self._sealing.pieces(key, encoded.nbytes, encoded.pieces())
        write = partial(self._medium.write, key, nbytes, pieces)
        written = self._guard.ask(write, _NOTHING_WRITTEN, nbytes=nbytes)
        self._publish_evicted(written.evicted)
        if written.stored:
            self._guard.note_transfer(written=True)
        return written.stored

    def note_use(self, key: str, weight: float) -> None:
        """Do nothing: the medium evicts for all servers, by the uses that it sees itself."""

    def set_pinned(self, keys: Set[str]) -> None:
        """Do nothing: other servers evict here, too, and do not know this one's pins."""

    def contains(self, key: str) -> bool:
        return self.nbytes(key) is not None

    def delete(self, key: str) -> bool:
        """Forget the key. Where the medium does not answer now, the chunk is tombstoned."""
        with self._lock:
            self._tombstoned.add(check_key(key))
        return self._guard.ask(partial(self._carry_out, key), False)

    def keys(self) -> tuple[str, ...]:
        nothing: tuple[str, ...] = ()
        return tuple(
            key
            for key in self._guard.ask(self._medium.keys, nothing, seconds=AUDIT_SECONDS)
            if not self._is_tombstoned(key)
        )

    def __len__(self) -> int:
        return self._usage().blobs

    def nbytes(self, key: str) -> int | None:
        blob = self._find(self._medium.stat, key)
        return None if blob is None else blob.nbytes

    def sizes(self, keys: Iterable[str]) -> dict[str, int] | None:
        if not self._guard.up:
            return None
        sizes: dict[str, int] = {}
        rest = iter(keys)
        while batch := tuple(islice(rest, KEYS_AT_ONCE)):
            found: dict[str, int] | None = self._guard.ask(partial(self._medium.sizes, batch), None)
            if found is None:
                return None
            sizes |= found
        with self._lock:
            return {key: size for key, size in sizes.items() if key not in self._tombstoned}

    def check(self) -> TierCheck:
        self._guard.ask(self._medium.audit, None, seconds=AUDIT_SECONDS)
        blobs = ((key, self._find(self._medium.stat, key)) for key in self.keys())
        read = (self._read(key, blob) for key, blob in blobs if blob is not None)
        return replace(TierCheck.of(self.name, read), reachable=self._guard.up)

    def clear(self) -> None:
        """Remove everything in this place, and the place itself: only for samples."""
        self._guard.ask(self._medium.clear, None, seconds=AUDIT_SECONDS)

    def close(self) -> None:
        self._guard.close()
        self._medium.close()

    def _is_tombstoned(self, key: str) -> bool:
        with self._lock:
            return check_key(key) in self._tombstoned

    def _usage(self) -> MediumUsage:
        self._last_usage = self._guard.ask(self._medium.usage, self._last_usage)
        return self._last_usage

    def _find(self, question: Callable[[str], Blob | None], key: str) -> Blob | None:
        """Return the result of ``stat`` or ``touch``, None for what is tombstoned; a copy that they
        find damaged is dropped."""
        if self._is_tombstoned(key):
            return None
        try:
            return self._guard.ask(partial(question, key), None)
        except BlobDamaged as damage:
            self._drop(key, str(damage))
            return None

    def _read(self, key: str, blob: Blob) -> ChunkKV | ChunkDamaged | None:
        """Return the verified KV; or the damage, after removing and publishing it; or None if it is
        a miss for now."""
        nbytes = blob.nbytes
        if nbytes > self.budget_bytes:  # a limit that was lowered, or another server's
            return None
        try:
            data = self._guard.ask(partial(self._fetch, key, blob, 0, nbytes), None, nbytes=nbytes)
            kv = None if data is None else decode_chunk(BufferSource(data), key, self._sealing)
        except (BlobDamaged, ChunkFileError) as damage:
            return self._drop(key, str(damage))
        except UnreadableHereError as error:
            logger.warning("Chunk %s was not read from tier %s: %s", key, self.name, error)
            return None
        if kv is not None:
            self._guard.note_transfer()
        return kv

    def _fetch(self, key: str, blob: Blob, start: int, nbytes: int) -> Bytes:
        data: Bytes = np.empty(nbytes, dtype=np.uint8)  # NumPy asks for huge pages
        self._medium.read_into(key, blob, start, data.data)
        return data

    def _fetch_part(self, key: str, blob: Blob, start: int, nbytes: int) -> Bytes:
        """Read bytes of a blob. Raises LayerLostError if the medium does not give them, and
        BlobDamaged."""
        data = self._guard.ask(partial(self._fetch, key, blob, start, nbytes), None, nbytes=nbytes)
        if data is None:
            raise LayerLostError(f"tier {self.name} did not deliver chunk {key}")
        self._guard.note_transfer()
        return data

    def _note_failed_read(self, key: str, error: Exception) -> None:
        if not isinstance(error, BlobDamaged | ChunkFileError):
            raise error
        self._drop(key, str(error))

    def _drop(self, key: str, reason: str) -> ChunkDamaged:
        self._guard.ask(partial(self._medium.delete, key), None)
        damage = ChunkDamaged(self.name, key, reason)
        self._events.publish(damage)
        return damage

    def _publish_evicted(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            self._events.publish(ChunkEvicted(self.name, size))

    def _reopen(self) -> None:
        """Reach a medium that was down, and delete what was tombstoned meanwhile. Raises the
        medium's errors."""
        with suppress(MediumRefused):
            self._publish_evicted(self._guard.call(self._medium.open))
            for key in tuple(self._tombstoned):
                self._guard.call(partial(self._carry_out, key))

    def _carry_out(self, key: str) -> bool:
        """Delete a tombstoned chunk from the medium; returns True, since ``GuardedMedium.ask``
        expects a result."""
        self._medium.delete(key)
        with self._lock:
            self._tombstoned.discard(key)
        return True


def missing_library(extra: str) -> StoreError:
    """Return the error for a medium whose library is not installed; ``extra`` is kvlinker's extra
    that brings it."""
    return StoreError(f"A library is missing: install it with  {install_command(extra)}")
