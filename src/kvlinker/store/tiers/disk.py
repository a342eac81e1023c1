"""Keeps chunks on a local disk, one file each, so that they survive a restart."""

from __future__ import annotations

import errno
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path

from blake3 import blake3

from kvlinker.base.errors import StoreError
from kvlinker.base.events import ChunkDamaged, Events
from kvlinker.base.types.chunks import Eviction
from kvlinker.store.chunk_kv import ChunkKV, ChunkReader
from kvlinker.store.eviction import EvictionIndex, NextUses
from kvlinker.store.format.byte_source import FileSource
from kvlinker.store.format.chunk_file import (
    TierReader,
    encode_chunk,
    open_chunk,
    open_regular,
    read_chunk_file,
    write_chunk_file,
)
from kvlinker.store.format.codecs import COMPRESSED_RAW, RAW, Codec, find_codec
from kvlinker.store.format.compression import UnreadableHereError
from kvlinker.store.format.durability import replace_file
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.format.sealing import NOT_SEALED, SealedDataError, Sealing
from kvlinker.store.loading.bandwidths import speed_name
from kvlinker.store.throttle import Rest, no_rest
from kvlinker.store.tiers.base import Tier, TierCheck
from kvlinker.store.tiers.configured import SCRATCH, ConfiguredTier, register
from kvlinker.store.tiers.indexed_folder import IndexedFolder

logger = logging.getLogger(__name__)

NOTE = "note"
"""The name of the file that ``write_note`` makes."""

_UNREADABLE = {errno.EIO, errno.EACCES, errno.EPERM}
"""Persistent read errors, such as for files that another user wrote: the chunk is better written
anew."""

_STALE_SCRATCH_SECONDS = 3600.0
"""The age in seconds from which a scratch folder counts as left by a process that was killed;
chosen by hand."""


class DiskTier(IndexedFolder):
    """A tier of files in a ``ChunkFolder``; a chunk's size is its file's, and every read verifies
    it.

    A file's modification time is its last use, so that the order of last uses survives a restart.
    The weights of uses do not survive it, nor do uses that only ``note_use`` reports.

    Several processes may share the folder (see ``IndexedFolder``). A chunk that one evicts or
    deletes vanishes for the others. Anything else at a file's place, such as a folder or a link, is
    a miss, and is replaced by the next file.
    """

    def __init__(
        self,
        directory: Path,
        budget_bytes: int,
        events: Events,
        *,
        name: str = "disk",
        pinned: Set[str] = frozenset(),
        sealing: Sealing = NOT_SEALED,
        codec: Codec = RAW,
        eviction: Eviction = "lru",
        next_uses: NextUses | None = None,
        yields: bool = True,
        adopts: bool = True,
    ) -> None:
        """Open the folder, create it where missing, and evict down to the budget.

        With ``yields``, chunks are evicted when the disk itself is full, too; otherwise another
        process does that. Without ``adopts``, no other process writes to the folder. Raises
        StoreError if the folder cannot be created or listed.
        """
        self.speed_name = speed_name(
            name, place=str(directory.absolute()), codec=codec, sealing=sealing
        )
        self._sealing = sealing
        self._codec = codec
        try:
            index = EvictionIndex(budget_bytes, pinned, eviction, next_uses)
            super().__init__(name, index, directory, events, yields=yields, adopts=adopts)
        except OSError as error:
            raise StoreError(
                f"The chunk cache folder {directory} cannot be used: {error}. "
                "Make it a folder that this user may write to, or choose another state directory."
            ) from error

    def beside(self, directory: Path, name: str) -> DiskTier:
        """Return a tier in a folder of the same disk, to which this process alone writes. It keeps
        KV as it is, encrypted like this one's, in what the chunks here leave of the budget: they
        never make room for it, but take its room. Raises StoreError."""
        lossless = COMPRESSED_RAW if self._codec.compresses else RAW
        guest = DiskTier(
            directory,
            self.budget_bytes,
            self._events,
            name=name,
            sealing=self._sealing,
            codec=lossless,
            adopts=False,
        )
        with self._lock:
            self._guest = guest
            self._limit_guest()
        return guest

    @property
    def directory(self) -> Path:
        return self._folder.directory

    def get(self, key: str) -> ChunkKV | None:
        if not self.contains(key):
            return None
        kv = self._read(key)
        if not isinstance(kv, ChunkKV):
            return None
        self.touch(key)
        return kv

    def open(self, key: str) -> ChunkReader | None:
        if not self.contains(key):
            return None
        with ExitStack() as stack:
            try:
                file = stack.enter_context(open_regular(self._folder.path(key)))
                chunk = open_chunk(FileSource(file), key, self._sealing)
            except (ChunkFileError, UnreadableHereError, OSError) as error:
                self._failed(key, error)
                return None
            self.touch(key)
            close = stack.pop_all().close
        return TierReader(chunk, failed=partial(self._failed, key), close=close)

    def put(self, key: str, kv: ChunkKV, rest: Rest = no_rest) -> bool:
        """Keep the KV as ``Tier.put`` does. Raises ValueError for KV that the file format does not
        hold: a caller's mistake."""
        if self.touch(key):
            return True
        encoded = encode_chunk(key, kv, self._codec, rest)
        nbytes = self._sealing.nbytes(encoded.nbytes)
        seal = partial(self._sealing.pieces, key, encoded.nbytes)
        with self.reserved(key, nbytes) as has_room:
            if not has_room:
                return False
            try:
                temporary = self._folder.write(
                    key, lambda file: write_chunk_file(file, encoded, seal, rest)
                )
            except OSError as error:
                self.refuse(key, nbytes, error)
                return False
        return self.commit(key, temporary, nbytes)

    def write_note(self, text: bytes) -> None:
        """Keep a text beside the files, encrypted like them. Raises OSError."""
        text = blake3(text).digest() + text
        pieces = self._sealing.pieces(NOTE, len(text), [memoryview(text)])
        replace_file(self.directory / NOTE, b"".join(pieces))

    def read_note(self) -> bytes | None:
        """Return the text that ``write_note`` kept; None where there is none that can be read."""
        with suppress(OSError, EOFError, SealedDataError), ExitStack() as stack:
            file = stack.enter_context(open_regular(self.directory / NOTE))
            source = self._sealing.source(NOTE, FileSource(file))
            text = source.read(0, source.size).tobytes()
            digest, text = text[: blake3.digest_size], text[blake3.digest_size :]
            return text if blake3(text).digest() == digest else None
        return None

    def unused_for(self, seconds: float) -> frozenset[str]:
        """Return the keys of all files that no process has written or read for so long."""
        latest = time.time() - seconds
        return frozenset(key for key, status in self._folder.files() if status.st_mtime < latest)

    def check(self) -> TierCheck:
        displaced = [ChunkDamaged(self.name, *place) for place in self.clear_places()]
        for damage in displaced:
            self._events.publish(damage)
        keys = [key for key, _ in self._folder.files()]
        read = (self._read(key) for key in keys if self.contains(key))
        return TierCheck.of(self.name, chain(displaced, read))

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    def _read(self, key: str) -> ChunkKV | ChunkDamaged | None:
        """Return the verified KV; or the damage, after removing and publishing it; or None if it is
        a miss for now."""
        try:
            return read_chunk_file(self._folder.path(key), key, self._sealing)
        except (ChunkFileError, UnreadableHereError, OSError) as error:
            return self._failed(key, error)

    def _failed(self, key: str, error: Exception) -> ChunkDamaged | None:
        """Handle a chunk that was not read: if it is damaged, it is removed, published and
        returned."""
        if isinstance(error, FileNotFoundError):
            self.forget(key)  # another process evicted or deleted it
            return None
        if isinstance(error, UnreadableHereError) or (
            isinstance(error, OSError) and error.errno not in _UNREADABLE
        ):
            logger.warning("Chunk %s was not read from %s: %s", key, self._folder.directory, error)
            return None
        if not self.drop(key):
            return None
        damage = ChunkDamaged(self.name, key, str(error))
        self._events.publish(damage)
        return damage


@register
class ConfiguredDisk(ConfiguredTier):
    """Keeps chunk files in the folder ``chunks`` of the state directory."""

    name = "disk"
    rank = 20
    settings = ("state_dir", "disk_space", "disk_codec", "eviction")

    @property
    def budget_bytes(self) -> int:
        return self.setup.settings.disk_space

    @property
    def codec(self) -> Codec:
        return find_codec(self.setup.settings.disk_codec)

    def open(self) -> Tier:
        return DiskTier(
            self.setup.settings.state_dir / "chunks",
            self.budget_bytes,
            self.setup.events,
            pinned=self.setup.pinned,
            sealing=self.sealing,
            codec=self.codec,
            eviction=self.setup.settings.eviction,
            next_uses=self.setup.next_uses,
        )

    def free_bytes(self) -> int:
        """Return the bytes that the disk has free, after creating the state directory. Raises
        StoreError."""
        folder = self.setup.settings.state_dir
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return shutil.disk_usage(folder).free
        except OSError as error:
            raise StoreError(
                f"The state directory {folder} cannot be used: {error}. Make it a folder that this"
                " user may write to, or choose another."
            ) from error

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        return _scratch(self.setup.settings.state_dir, budget_bytes, self.codec, self.sealing)


@contextmanager
def _scratch(folder: Path, budget_bytes: int, codec: Codec, sealing: Sealing) -> Iterator[Tier]:
    """Open a tier in a temporary folder, and remove those that processes which were killed have
    left."""
    for left in folder.glob(f"{SCRATCH}-*"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _STALE_SCRATCH_SECONDS:
                shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}-", dir=folder) as scratch:
        yield DiskTier(Path(scratch), budget_bytes, Events(), sealing=sealing, codec=codec)
