"""The tier that all remote media share: encoding, verification, faults; the chunk store is its caller."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable, Set
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from kvlinker.events import ChunkDamaged, ChunkEvicted, Events, TierUnavailable
from kvlinker.store.chunk_kv import ChunkKV
from kvlinker.store.format.byte_source import AheadSource, BufferSource, Bytes
from kvlinker.store.format.chunk_file import TierReader, decode_chunk, encode_chunk, open_chunk
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.compression import MissingLibraryError
from kvlinker.store.format.encryption import NOT_SEALED, Sealing
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.loading.bandwidth import speed_name
from kvlinker.store.loading.layer_stream import ChunkReader, LayerLostError
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import TierCheck
from kvlinker.store.tiers.medium import (
    KEYS_AT_ONCE,
    Availability,
    BlobDamaged,
    BlobGone,
    BlobMedium,
    Deadline,
    MediumRefused,
    MediumUnavailable,
    MediumUsage,
    Written,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""A medium that says nothing for so long does not answer."""

SLOWEST_BYTES_PER_SECOND = 10e6
"""What is read or written more slowly than this is given up."""

PAUSE_SECONDS = 3.0

_KEY = re.compile(r"[0-9a-f]{64}")
_NOTHING_WRITTEN = Written(stored=False)


class BlobTier:
    """Keeps each chunk as one blob, the bytes of a chunk file, in a medium that other servers may share.

    A chunk's size here is its blob's. Whatever the medium does, callers see hits and misses, and wait a bounded time;
    while it does not answer, they do not wait at all. Deletes that could not be done are done when it is back.
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
        """``conceal`` takes credentials out of what the medium's errors say."""
        self.name = name
        self.speed_name = speed_name(name, place=medium.place, codec=codec, sealing=sealing)
        self._medium = medium
        self._events = events
        self._answer_seconds = answer_seconds
        self._conceal = conceal
        self._sealing = sealing
        self._codec = codec
        self._deadline = Deadline()
        self._availability = Availability(name, medium.place, self._reopen, pause=pause_seconds)
        self._lock = threading.Lock()
        self._doomed: set[str] = set()  # deleted, but not yet from the medium
        self._refusing = False
        self._last_usage = MediumUsage(0, 0)
        self._told_evicted(self._ask(medium.open, ()))

    @property
    def budget_bytes(self) -> int:
        return self._medium.budget_bytes

    @property
    def used_bytes(self) -> int:
        """As last known while the medium does not answer."""
        return self._usage().used_bytes

    def get(self, key: str) -> ChunkKV | None:
        if self._is_doomed(key):
            return None
        nbytes = self._size(self._medium.touch, key)
        kv = None if nbytes is None else self._read(key, nbytes)
        return kv if isinstance(kv, ChunkKV) else None

    def open(self, key: str) -> ChunkReader | None:
        if self._is_doomed(key):
            return None
        nbytes = self._size(self._medium.touch, key)
        if nbytes is None:
            return None
        if nbytes > self.budget_bytes:
            self._drop(key, f"{nbytes} bytes are more than the whole tier may hold")
            return None
        failed = partial(self._failed_to_read, key)
        source = AheadSource(nbytes, partial(self._fetched_part, key))
        try:
            return TierReader(open_chunk(source, key, self._sealing), failed=failed)
        except LayerLostError:
            return None
        except MissingLibraryError as error:
            logger.warning("Chunk %s was not read from tier %s: %s", key, self.name, error)
            return None
        except Exception as error:
            failed(error)
            return None

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """As ``Tier.put``. Raises ValueError for KV that chunk files do not hold: a caller's mistake."""
        if not self._is_doomed(key) and self._size(self._medium.touch, key) is not None:
            return True
        if not self._availability.up:
            return False
        encoded = encode_chunk(_checked(key), kv, self._codec, rest)
        nbytes = self._sealing.nbytes(encoded.nbytes)
        if nbytes > self.budget_bytes:
            return False
        with self._lock:
            self._doomed.discard(key)
        pieces = self._sealing.pieces(key, encoded.nbytes, encoded.pieces())
        write = partial(self._medium.write, key, nbytes, pieces)
        written = self._ask(write, _NOTHING_WRITTEN, nbytes=nbytes)
        self._told_evicted(written.evicted)
        if written.stored:
            self._refusing = False
            self._availability.succeeded()
        return written.stored

    def note_use(self, key: str, weight: float) -> None:
        """Does nothing: what is evicted here is for all servers to say, by the uses that the medium sees itself."""

    def set_pinned(self, keys: Set[str]) -> None:
        """Does nothing: the other servers evict here, too, and do not know of this one's pins."""

    def contains(self, key: str) -> bool:
        return self.nbytes(key) is not None

    def delete(self, key: str) -> bool:
        """Where the medium does not answer now, the chunk is not found any more, and removed later."""
        with self._lock:
            self._doomed.add(_checked(key))
        return self._ask(partial(self._carry_out, key), False)

    def keys(self) -> tuple[str, ...]:
        nothing: tuple[str, ...] = ()
        return tuple(key for key in self._ask(self._medium.keys, nothing) if not self._is_doomed(key))

    def __len__(self) -> int:
        return self._usage().blobs

    def nbytes(self, key: str) -> int | None:
        return None if self._is_doomed(key) else self._size(self._medium.stat, key)

    def sizes(self, keys: Iterable[str]) -> dict[str, int] | None:
        if not self._availability.up:
            return None
        sizes: dict[str, int] = {}
        rest = iter(keys)
        while batch := tuple(islice(rest, KEYS_AT_ONCE)):
            found: dict[str, int] | None = self._ask(partial(self._medium.sizes, batch), None)
            if found is None:
                return None
            sizes |= found
        with self._lock:
            return {key: size for key, size in sizes.items() if key not in self._doomed}

    def check(self) -> TierCheck:
        self._ask(self._medium.audit, None)
        sizes = {key: self._size(self._medium.stat, key) for key in self.keys()}
        results = [self._read(key, nbytes) for key, nbytes in sizes.items() if nbytes is not None]
        damaged = tuple(result for result in results if isinstance(result, ChunkDamaged))
        return TierCheck(self.name, checked=len(results), damaged=damaged)

    def clear(self) -> None:
        """Remove everything in this place, and the place itself: for one that holds nothing of worth."""
        self._ask(self._medium.clear, None)

    def close(self) -> None:
        self._availability.close()
        self._medium.close()

    def _is_doomed(self, key: str) -> bool:
        with self._lock:
            return _checked(key) in self._doomed

    def _usage(self) -> MediumUsage:
        self._last_usage = self._ask(self._medium.usage, self._last_usage)
        return self._last_usage

    def _size(self, question: Callable[[str], int | None], key: str) -> int | None:
        """What ``stat`` or ``touch`` answers; damage that they see is dealt with."""
        try:
            return self._ask(partial(question, key), None)
        except BlobDamaged as damage:
            self._drop(key, str(damage))
            return None

    def _read(self, key: str, nbytes: int) -> ChunkKV | ChunkDamaged | None:
        """The verified KV; or the damage, after removing and publishing it; or None where it is a miss for now."""
        if nbytes > self.budget_bytes:
            return self._drop(key, f"{nbytes} bytes are more than the whole tier may hold")
        try:
            data = self._ask(partial(self._fetched, key, 0, nbytes), None, nbytes=nbytes)
            kv = None if data is None else decode_chunk(BufferSource(data), key, self._sealing)
        except (BlobDamaged, ChunkFileError) as damage:
            return self._drop(key, str(damage))
        except MissingLibraryError as error:
            logger.warning("Chunk %s was not read from tier %s: %s", key, self.name, error)
            return None
        if kv is not None:
            self._availability.succeeded()
        return kv

    def _fetched(self, key: str, start: int, nbytes: int) -> Bytes:
        data: Bytes = np.empty(nbytes, dtype=np.uint8)  # NumPy asks for huge pages
        self._medium.read_into(key, start, data.data)
        return data

    def _fetched_part(self, key: str, start: int, nbytes: int) -> Bytes:
        """Raises LayerLostError where the medium does not give it, and BlobDamaged."""
        data = self._ask(partial(self._fetched, key, start, nbytes), None, nbytes=nbytes)
        if data is None:
            raise LayerLostError(f"tier {self.name} did not deliver chunk {key}")
        self._availability.succeeded()
        return data

    def _failed_to_read(self, key: str, error: Exception) -> None:
        if not isinstance(error, BlobDamaged | ChunkFileError):
            raise error
        self._drop(key, str(error))

    def _drop(self, key: str, reason: str) -> ChunkDamaged:
        self._ask(partial(self._medium.delete, key), None)
        damage = ChunkDamaged(self.name, key, reason)
        self._events.publish(damage)
        return damage

    def _told_evicted(self, sizes: tuple[int, ...]) -> None:
        for size in sizes:
            self._events.publish(ChunkEvicted(self.name, size))

    def _ask(self, call: Callable[[], T], otherwise: T, *, nbytes: int = 0) -> T:
        """What the call returns, or ``otherwise`` where the blob is gone, or the medium is down, fails or refuses.

        ``nbytes`` is how much the call moves. Raises BlobDamaged.
        """
        if not self._availability.up:
            return otherwise
        try:
            return self._deadline.call(call, self._answer_seconds + nbytes / SLOWEST_BYTES_PER_SECOND)
        except BlobDamaged:
            raise
        except BlobGone:
            pass
        except MediumRefused as refusal:
            self._refused(str(refusal))
        except Exception as error:  # a library's own: whatever it is, the medium is of no use now
            self._failed(error)
        return otherwise

    def _failed(self, error: Exception) -> None:
        reason = self._conceal(str(error) or "no answer in time")
        if not isinstance(error, MediumUnavailable | TimeoutError):
            reason = f"{type(error).__name__}: {reason}"
        self._availability.failed(reason)
        self._events.publish(TierUnavailable(self.name, reason))

    def _refused(self, reason: str) -> None:
        reason = self._conceal(reason)
        if not self._refusing:
            self._refusing = True
            logger.warning("Tier %s (%s) does not take chunks for now: %s", self.name, self._medium.place, reason)
        self._events.publish(TierUnavailable(self.name, reason))

    def _reopen(self) -> bool:
        """Whether the medium answers again; then what was deleted in the meantime is removed."""
        try:
            with suppress(MediumRefused):
                self._told_evicted(self._deadline.call(self._medium.open, self._answer_seconds))
                for key in tuple(self._doomed):
                    self._deadline.call(partial(self._carry_out, key), self._answer_seconds)
        except Exception as error:
            self._events.publish(TierUnavailable(self.name, self._conceal(str(error) or "no answer in time")))
            return False
        return True

    def _carry_out(self, key: str) -> bool:
        """Delete a doomed chunk from the medium: True."""
        self._medium.delete(key)
        with self._lock:
            self._doomed.discard(key)
        return True


def _checked(key: str) -> str:
    if not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a chunk key: 64 lowercase hexadecimal characters.")
    return key
