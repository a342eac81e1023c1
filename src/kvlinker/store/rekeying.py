"""Changes the key of a state directory: ``kvlinker caches rekey`` is the caller."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvlinker.base.errors import StoreError
from kvlinker.store.catalog.catalog import open_database
from kvlinker.store.catalog.encryption import change_key
from kvlinker.store.format.byte_source import Bytes, FileSource
from kvlinker.store.format.chunk_file import open_chunk, open_regular
from kvlinker.store.format.compression import UnreadableHereError
from kvlinker.store.format.encryption import Cipher
from kvlinker.store.format.header import ChunkFileError
from kvlinker.store.format.sealing import SealedDataError, Sealing, sealing_of
from kvlinker.store.prefixes import remove_leftovers
from kvlinker.store.tiers.chunk_folder import ChunkFolder


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """The numbers of chunk files that a change of key has processed."""

    written: int
    """Files that were encrypted anew."""
    finished_before: int
    """Files that had the new key already, from a run that was broken off."""
    removed: int
    """Files that opened with neither key."""


def rekey(
    catalog: Path | str,
    chunks: Path,
    old: Cipher | None,
    new: Cipher | None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Rekeyed:
    """Encrypt a catalog in one transaction and then its chunk files, one by one, with ``new``, or
    with nothing.

    Broken off, it is finished by another call with the same keys: once the transaction is done, the
    directory is the new key's, and files that still have the old one are damage to others.
    ``progress`` is called with the number of files done, and of all. Raises StoreError if others
    use the directory, ``old`` is not its key, or a file cannot be written.
    """
    with closing(open_database(catalog)) as database, closing(database.lock()) as lock:
        lock.take_alone()
        change_key(database, old, new)
        database.compact()  # also if a run before this one was broken off in between
        remove_leftovers(chunks, older_than=-math.inf)
        try:
            return _rekey_files(ChunkFolder(chunks), sealing_of(old), sealing_of(new), progress)
        except OSError as error:
            raise StoreError(
                f"A chunk file below {chunks} was not encrypted anew: {error}. Run this again with"
                " the same keys."
            ) from error


def _rekey_files(
    folder: ChunkFolder, old: Sealing, new: Sealing, progress: Callable[[int, int], None]
) -> Rekeyed:
    folder.remove_temporary_files(older_than=0.0)  # no other process is writing
    files = list(folder.files())
    written = finished_before = removed = 0
    for done, (key, status) in enumerate(files):
        progress(done, len(files))
        path = folder.path(key)
        if _open_plain(path, key, new) is not None:
            finished_before += 1
        elif (plain := _open_plain(path, key, old)) is not None:
            folder.place(
                folder.write(key, _writing(new, key, plain), last_use=status.st_mtime_ns), key
            )
            folder.settle(key)
            written += 1
        else:
            folder.remove(path)
            removed += 1
    progress(len(files), len(files))
    return Rekeyed(written, finished_before, removed)


def _open_plain(path: Path, key: str, sealing: Sealing) -> Bytes | None:
    """Return all plain bytes of a chunk file; None if it does not open so."""
    with open_regular(path) as file:
        source = FileSource(file)
        try:
            with suppress(
                UnreadableHereError
            ):  # its header was read by then, and the rest need not be decoded
                open_chunk(source, key, sealing)
            plain = sealing.source(key, source)
            return plain.read(0, plain.size)
        except (ChunkFileError, SealedDataError, EOFError):
            return None


def _writing(sealing: Sealing, key: str, plain: Bytes) -> Callable[[BinaryIO], None]:
    return lambda file: file.writelines(sealing.pieces(key, len(plain), [plain.data]))
