"""Keeps chunks as objects in any storage of fsspec: S3, Google Cloud Storage, Azure, a mounted
folder."""

from __future__ import annotations

import errno
import re
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from kvlinker.base.errors import StoreError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.store.eviction import EvictionIndex
from kvlinker.store.format.codecs import RAW, Codec
from kvlinker.store.format.durability import TEMPORARY_SUFFIX
from kvlinker.store.format.sealing import sealing_of
from kvlinker.store.redaction import place_of, redacted
from kvlinker.store.remote.blob_tier import EXCHANGE_SECONDS, BlobTier, missing_library
from kvlinker.store.remote.medium import (
    Blob,
    BlobDamaged,
    BlobGone,
    MediumRefused,
    MediumUnavailable,
    MediumUsage,
    WriteOutcome,
)

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

LISTING_SECONDS = 300.0
"""The time from one listing of what other servers wrote and removed to the next; chosen by hand."""

_NAME = re.compile(rf"([0-9a-f]{{2}})/(?=\1)({CHUNK_KEY.pattern})\.safetensors")
_TEMPORARY_NAME = re.compile(
    rf"[0-9a-f]{{2}}/{CHUNK_KEY.pattern}\.[0-9a-f]{{32}}{re.escape(TEMPORARY_SUFFIX)}"
)
_STALE_SECONDS = 600.0  # the age of a temporary file whose writer is gone; chosen by hand
_LOCAL = {"file", "local"}
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")


class ObjectMedium:
    """Keeps each blob as ``<url>/<first two characters of the key>/<key>.safetensors``; other names
    are left alone.

    A thread lists the blobs and their sizes when the medium is opened, and every few minutes. Blobs
    that others wrote since are found when they are asked for. Each server knows its own uses only:
    others' blobs count as last used when they were written. Other servers' writes may exceed the
    budget, until a server that has listed them writes itself.
    """

    ahead_bytes = 8 << 20

    def __init__(
        self,
        url: str,
        budget_bytes: int,
        *,
        timeout: float,
        folder: str = "",
        listing_seconds: float = LISTING_SECONDS,
    ) -> None:
        """Prepare to connect, which is done by ``open``.

        ``folder`` lies below the URL. ``timeout`` is how long to wait for the first listing, in
        seconds. Raises StoreError for a URL that is none, or whose library is missing.
        """
        try:
            import fsspec
        except ModuleNotFoundError as error:
            raise missing_library("remote") from error
        self.place = place_of(url)
        self.budget_bytes = budget_bytes
        self._timeout = timeout
        self._listing_seconds = listing_seconds
        try:
            self._files, root = fsspec.core.url_to_fs(
                url, skip_instance_cache=True, use_listings_cache=False
            )
        except Exception as error:  # its message may quote the credentials, as may its cause
            raise StoreError(
                f"The object store {self.place} cannot be used: {redacted(str(error), url)}. Give a"
                " URL that fsspec knows, such as s3://bucket/folder or gs://bucket/folder, and"
                " install its library (s3fs, gcsfs, …)."
            ) from None
        self._root = f"{root.rstrip('/')}/{folder}".rstrip("/")
        protocols = self._files.protocol
        self._is_local = bool(
            _LOCAL & set([protocols] if isinstance(protocols, str) else protocols)
        )
        self._made = self._missing_folders() if folder else []
        self._lock = threading.RLock()
        self._index = EvictionIndex(budget_bytes)
        self._used_at: dict[str, float] = {}  # Unix seconds
        self._changed_at: dict[
            str, float
        ] = {}  # by this server since the last listing; a listing may not know yet
        self._listed_at = float("-inf")
        self._listing: threading.Thread | None = None
        self._listing_error: Exception | None = None

    def open(self) -> tuple[int, ...]:
        """List what is there and evict down to the budget; a listing that takes long goes on in the
        background."""
        self._listed_at = float("-inf")
        self._listing_error = None
        self._list_if_old()
        if self._listing is not None:
            self._listing.join(self._timeout)
        if self._listing_error is not None:
            raise self._listing_error
        return self._evict_for(0)

    def stat(self, key: str) -> Blob | None:
        self._list_if_old()
        with self._lock:
            known = self._index.nbytes(key)
        if known is not None:
            return Blob(known)
        try:
            with _medium_errors():
                found = self._files.info(self._path(key))
        except BlobGone:
            return None
        if found["type"] != "file":
            return None
        with self._lock:
            if key not in self._index:
                self._note(key, found["size"], _time_of_write(found))
        return Blob(int(found["size"]))

    def touch(self, key: str) -> Blob | None:
        blob = self.stat(key)
        with self._lock:
            if self._index.touch(key):
                self._used_at[key] = time.time()
        return blob

    def read_into(self, key: str, blob: Blob, start: int, target: memoryview) -> None:
        try:
            with _medium_errors():
                data = self._files.cat_file(self._path(key), start=start, end=start + len(target))
        except BlobGone:
            with self._lock:
                self._forget(key)
            raise
        if len(data) != len(target):
            raise BlobDamaged(f"it ends {len(target) - len(data)} bytes too early")
        target[:] = data

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> WriteOutcome:
        evicted = self._evict_for(nbytes)
        try:
            with _medium_errors():
                self._put(self._path(key), pieces)
        except BlobGone as error:
            raise MediumRefused(f"there is no such place: {error.__cause__}") from error
        with self._lock:
            self._note(key, nbytes, time.time())
        return WriteOutcome(stored=True, evicted=evicted + self._evict_for(0))

    def delete(self, key: str) -> None:
        with self._lock:
            self._forget(key)
        with suppress(BlobGone), _medium_errors():
            self._files.rm_file(self._path(key))

    def keys(self) -> tuple[str, ...]:
        self._list_if_old()
        with self._lock:
            return self._index.keys()

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Return the bytes of those of the keys that were there when they were last listed."""
        self._list_if_old()
        with self._lock:
            return self._index.sizes(keys)

    def usage(self) -> MediumUsage:
        self._list_if_old()
        with self._lock:
            return MediumUsage(self._index.used_bytes, len(self._index))

    def audit(self) -> None:
        with _medium_errors():
            self._list()

    def clear(self) -> None:
        with suppress(BlobGone), _medium_errors():
            self._files.rm(self._root, recursive=True)
        for made in self._made:
            with suppress(OSError):
                self._files.rmdir(made)
        with self._lock:
            self._index = EvictionIndex(self.budget_bytes)

    def close(self) -> None:
        """Do nothing: nothing is open between calls."""

    def _missing_folders(self) -> list[str]:
        """Return the local folders above this one that the first write will make, the innermost
        first."""
        missing = []
        above = self._root.rpartition("/")[0]
        while self._is_local and above and not self._files.exists(above):
            missing.append(above)
            above = above.rpartition("/")[0]
        return missing

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}.safetensors"

    def _put(self, path: str, pieces: Iterable[memoryview]) -> None:
        """Write the blob so that it appears whole: an object does by itself, a file by renaming."""
        if not self._is_local:
            self._files.pipe_file(path, b"".join(pieces))
            return
        temporary = f"{path.removesuffix('.safetensors')}.{secrets.token_hex(16)}{TEMPORARY_SUFFIX}"
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        try:
            with self._files.open(temporary, "wb") as file:
                for piece in pieces:
                    file.write(piece)
            self._files.mv(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._files.rm_file(temporary)
            raise

    def _note(self, key: str, nbytes: int, used_at: float) -> None:
        """Count a blob that is there; the lock is held."""
        self._index.remove(key)
        self._index.add(key, nbytes)
        self._used_at[key] = used_at
        self._changed_at[key] = time.monotonic()

    def _forget(self, key: str) -> None:
        """Count a blob no more; the lock is held."""
        self._index.remove(key)
        self._used_at.pop(key, None)
        self._changed_at[key] = time.monotonic()

    def _evict_for(self, nbytes: int) -> tuple[int, ...]:
        with self._lock:
            removed = self._index.make_room(nbytes)
            for key, _ in removed:
                self._forget(key)
        for key, _ in removed:
            with suppress(BlobGone), _medium_errors():
                self._files.rm_file(self._path(key))
        return tuple(size for _, size in removed)

    def _list_if_old(self) -> None:
        """Start a listing in the background where the last one is old."""
        with self._lock:
            under_way = self._listing is not None and self._listing.is_alive()
            if under_way or time.monotonic() - self._listed_at < self._listing_seconds:
                return
            self._listing = threading.Thread(
                target=self._list_in_the_background, name="kvlinker-listing", daemon=True
            )
            self._listing.start()

    def _list_in_the_background(self) -> None:
        try:
            with _medium_errors():
                self._list()
            self._listing_error = None
        except Exception as error:  # for ``open``; later, calls that matter meet it themselves
            self._listing_error = error

    def _list(self) -> None:
        """Index what is there, in the order of last use; what this server changed meanwhile is
        newer than the list."""
        now = time.time()
        started = self._listed_at = time.monotonic()
        found = {}
        for path, info in self._find().items():
            name = str(path).removeprefix(self._root).lstrip("/")
            if match := _NAME.fullmatch(name):
                found[match[2]] = int(info["size"]), _time_of_write(info)
            elif _TEMPORARY_NAME.fullmatch(name) and now - _time_of_write(info) > _STALE_SECONDS:
                with suppress(OSError):
                    self._files.rm_file(path)
        with self._lock:
            for key, changed_at in self._changed_at.items():
                if changed_at >= started:
                    found.pop(key, None)
                    if (nbytes := self._index.nbytes(key)) is not None:
                        found[key] = nbytes, self._used_at[key]
            used_at = {
                key: max(modified, self._used_at.get(key, 0.0))
                for key, (_, modified) in found.items()
            }
            self._index = EvictionIndex(self.budget_bytes)
            for key in sorted(found, key=lambda key: (used_at[key], key)):
                self._index.add(key, found[key][0])
            self._used_at = used_at
            self._changed_at = {key: at for key, at in self._changed_at.items() if at >= started}

    def _find(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        return found


@contextmanager
def _medium_errors() -> Iterator[None]:
    """Raise exceptions of fsspec's file systems as a medium's."""
    try:
        yield
    except FileNotFoundError as error:
        raise BlobGone from error
    except OSError as error:
        kind = (
            MediumRefused
            if error.errno in _REFUSALS or isinstance(error, PermissionError)
            else MediumUnavailable
        )
        raise kind(str(error)) from error


def _time_of_write(info: dict[str, Any]) -> float:
    """Return when the object was written, in Unix seconds; 0 if nothing says so."""
    value = next((info[name] for name in _TIMES if info.get(name) is not None), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value.timestamp() if isinstance(value, datetime) else float(value)


def object_tier(
    url: str,
    budget_bytes: int,
    events: Events,
    *,
    folder: str = "",
    cipher: Cipher | None = None,
    codec: Codec = RAW,
) -> BlobTier:
    """Open a tier of objects in a folder below a URL that fsspec knows; the place need not be
    reachable.

    Raises StoreError for a URL that is none, or where its library is missing.
    """
    medium = ObjectMedium(url, budget_bytes, timeout=EXCHANGE_SECONDS, folder=folder)
    return BlobTier(
        "object",
        medium,
        events,
        conceal=partial(redacted, url=url),
        sealing=sealing_of(cipher),
        codec=codec,
    )
