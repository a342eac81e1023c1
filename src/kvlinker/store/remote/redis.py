"""Keeps chunks in a Redis server that several kvlinker servers, and others, may share.

Redis itself limits its memory (``maxmemory``) and evicts (``maxmemory-policy``).
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from kvlinker.base.errors import StoreError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.store.format.codecs import RAW, Codec
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
from kvlinker.store.tiers.base import UNKNOWN_BUDGET

if TYPE_CHECKING:
    from kvlinker.store.format.encryption import Cipher

logger = logging.getLogger(__name__)

PART_BYTES = 1 << 20
"""The bytes of a blob in one field of its hash; chosen by hand, far below the 512 MB that Redis
allows for one value."""

UNUSED_SECONDS = 7 * 86_400
"""The seconds after its last use at which a blob expires: a week, as for what the disk keeps of
prompts; chosen by hand. Redis evicts earlier where its memory is full."""

_PARTS_PER_COMMAND = 8  # 8 MB take 70 ms at 1 Gbit/s, far less than the limit of an exchange
_KEYS_PER_COMMAND = 500  # chosen by hand: a round trip for some 50 kB of names
_TEMPORARY_SECONDS = 60  # from one batch of parts to the next; chosen by hand
_POLICIES = ("allkeys-lru", "allkeys-lfu", "volatile-lru", "volatile-lfu")
_SIZE = "size"  # the field with the blob's size, beside its parts' "0", "1", …
_VERSION = "version"  # that of a random token; chunks of kvlinker 0.1.0 have none

T = TypeVar("T")


class RedisMedium:
    """Keeps each blob as a hash, under keys that begin with ``<prefix>:``; no other key is ever
    touched.

    The budget is Redis' ``maxmemory`` and the usage its used memory: they include all that others
    keep in the same server. Evictions are Redis' own, so that nothing counts them here.
    """

    ahead_bytes = 2 * PART_BYTES

    def __init__(self, url: str, *, prefix: str, timeout: float) -> None:
        """Prepare to connect, which is done when something is asked. ``timeout``, in seconds, is
        for each single exchange of bytes.

        Raises StoreError for a URL that is none, or where redis-py is missing.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise missing_library("redis") from error
        self.place = place_of(url)
        self.budget_bytes = UNKNOWN_BUDGET
        """The ``maxmemory`` when Redis was last asked, or all memory of its machine where none is
        set."""
        self._prefix = f"{prefix}:"
        self._blobs = f"{prefix}:chunk:"
        self._temporary = f"{prefix}:temporary:"
        self._warned = False
        try:
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
            )
        except Exception:  # whose message may quote the password
            raise StoreError(
                f"The Redis URL of {self.place} is not valid. Give"
                " redis://[user:password@]host:port/database, rediss:// for TLS, or unix:///path,"
                " with special characters in the password percent-encoded."
            ) from None

    def open(self) -> tuple[int, ...]:
        """Read the limits of Redis, and warn if they let its memory run full; returns nothing."""
        memory = self._memory()
        if not self._warned:
            self._warned = True
            if not memory:
                logger.warning(
                    "Redis %s refuses INFO to this user: its limits and its usage are not known."
                    " Allow it: ACL SETUSER <user> +info.",
                    self.place,
                )
            elif memory.get("maxmemory") == 0:
                logger.warning(
                    "Redis %s has no maxmemory: chunks fill its machine's memory. Set maxmemory,"
                    " and maxmemory-policy allkeys-lru.",
                    self.place,
                )
            elif (policy := memory.get("maxmemory_policy", _POLICIES[0])) not in _POLICIES:
                logger.warning(
                    "Redis %s has maxmemory-policy %s: once it is full, it takes no new chunks, or"
                    " evicts by another rule than use. Set allkeys-lru, or volatile-lru where it"
                    " has others' data.",
                    self.place,
                    policy,
                )
        return ()

    def stat(self, key: str) -> Blob | None:
        return self._find(key, used=False)

    def touch(self, key: str) -> Blob | None:
        return self._find(key, used=True)

    def read_into(self, key: str, blob: Blob, start: int, target: memoryview) -> None:
        first, last = start // PART_BYTES, (start + len(target) - 1) // PART_BYTES
        position = 0
        skipped = start - first * PART_BYTES
        for numbers in _batches(range(first, last + 1), _PARTS_PER_COMMAND):
            with _medium_errors():
                size, version, *parts = self._redis.hmget(
                    self._blobs + key, [_SIZE, _VERSION, *map(str, numbers)]
                )
            if size is None or (version or b"") != blob.version:
                raise BlobGone
            for number, part in zip(numbers, parts, strict=True):
                wanted = memoryview(part or b"")[skipped : skipped + len(target) - position]
                if number != last and skipped + len(wanted) != PART_BYTES:
                    raise BlobDamaged(f"its part {number} does not have {PART_BYTES} bytes")
                target[position : position + len(wanted)] = wanted
                position += len(wanted)
                skipped = 0
        if position != len(target):
            raise BlobDamaged(f"it ends {len(target) - position} bytes too early")

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> WriteOutcome:
        version = secrets.token_hex(16)
        temporary = self._temporary + version
        fields = 0
        try:
            with _medium_errors():
                for batch in _batches(_fields(nbytes, version, pieces), _PARTS_PER_COMMAND):
                    pipeline = self._redis.pipeline()  # a transaction: no part without its end
                    pipeline.hset(temporary, mapping=dict(batch))
                    pipeline.expire(temporary, _TEMPORARY_SECONDS)
                    pipeline.execute()
                    fields += len(batch)
                if self._redis.hlen(temporary) != fields:
                    raise MediumRefused("it evicted a chunk while the chunk was written")
                pipeline = self._redis.pipeline()
                # another server's blob stays: it may be being read
                pipeline.renamenx(temporary, self._blobs + key)
                pipeline.expire(self._blobs + key, UNUSED_SECONDS)
                pipeline.unlink(temporary)
                pipeline.execute()
        except BaseException:
            with suppress(MediumUnavailable, MediumRefused), _medium_errors():
                self._redis.unlink(temporary)
            raise
        return WriteOutcome(stored=True)

    def delete(self, key: str) -> None:
        with _medium_errors():
            self._redis.unlink(self._blobs + key)

    def keys(self) -> tuple[str, ...]:
        """Return the keys of all blobs, in no order."""
        with _medium_errors():
            names = {
                name.decode(errors="replace").removeprefix(self._blobs)
                for name in self._names(self._blobs)
            }
        return tuple(name for name in names if CHUNK_KEY.fullmatch(name))

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        pipeline = self._redis.pipeline(transaction=False)
        for key in keys:
            pipeline.hget(self._blobs + key, _SIZE)
        with _medium_errors():
            found = pipeline.execute(raise_on_error=False)
        return {
            key: int(size)
            for key, size in zip(keys, found, strict=True)
            if isinstance(size, bytes) and size.isdigit()
        }

    def usage(self) -> MediumUsage:
        """Return the memory that Redis uses and the keys of its database, others' included."""
        memory = self._memory()
        with _medium_errors():
            return MediumUsage(int(memory.get("used_memory", 0)), int(self._redis.dbsize()))

    def audit(self) -> None:
        """Let blobs expire that never would: kvlinker 0.1.0 wrote such ones."""
        with _medium_errors():
            for names in _batches(self._names(self._blobs), _KEYS_PER_COMMAND):
                pipeline = self._redis.pipeline(transaction=False)
                for name in names:
                    pipeline.ttl(name)
                for name, seconds in zip(names, pipeline.execute(), strict=True):
                    if seconds == -1:
                        self._redis.expire(name, UNUSED_SECONDS)

    def clear(self) -> None:
        with _medium_errors():
            for batch in _batches(self._names(self._prefix), _KEYS_PER_COMMAND):
                self._redis.unlink(*batch)

    def close(self) -> None:
        self._redis.close()

    def _find(self, key: str, *, used: bool) -> Blob | None:
        """Return the blob, or None if there is none. Raises BlobDamaged."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.hlen(self._blobs + key)
        pipeline.hmget(self._blobs + key, [_SIZE, _VERSION])
        if used:
            pipeline.expire(self._blobs + key, UNUSED_SECONDS)
        with _medium_errors():
            # a Redis that is read-only refuses to expire, and is read on
            fields, named, *_ = pipeline.execute(raise_on_error=False)
            for answer in (fields, named):
                if isinstance(answer, Exception):
                    raise answer
        size, version = named
        return _blob(size, version, fields)

    def _memory(self) -> dict[str, Any]:
        """Return what Redis says of its memory, nothing where it refuses to, and keep its limit as
        the budget."""
        memory: dict[str, Any] = {}
        with suppress(MediumRefused), _medium_errors():
            memory = self._redis.info("memory")
        limit = memory.get("maxmemory") or memory.get("total_system_memory")
        self.budget_bytes = int(limit or UNKNOWN_BUDGET)
        return memory

    def _names(self, prefix: str) -> Iterator[bytes]:
        """Yield the names of keys that begin with ``prefix``, some perhaps twice."""
        names: Iterator[bytes] = self._redis.scan_iter(match=_literal(prefix) + "*", count=1000)
        return names


@contextmanager
def _medium_errors() -> Iterator[None]:
    """Raise redis-py's exceptions as a medium's."""
    from redis import exceptions

    try:
        yield
    except exceptions.ResponseError as error:
        if str(error).startswith("WRONGTYPE"):
            raise BlobDamaged("what lies under its key is not a blob") from error
        raise MediumRefused(_reason(error)) from error
    except (exceptions.RedisError, OSError) as error:
        raise MediumUnavailable(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return what went wrong, without the command, which redis-py puts before it: that may hold
    parts of a chunk."""
    return str(error).rpartition("caused error: ")[2]


def _blob(size: bytes | None, version: bytes | None, fields: int) -> Blob | None:
    """Return the blob of a hash of ``fields`` fields; None for none. Raises BlobDamaged."""
    if not fields:
        return None
    if size is None or not size.isdigit():
        raise BlobDamaged("its size is not a number")
    parts = fields - 1 - (version is not None)
    if parts != -(-int(size) // PART_BYTES):
        raise BlobDamaged("it has not as many parts as its size says")
    return Blob(int(size), version or b"")


def _fields(
    nbytes: int, version: str, pieces: Iterable[memoryview]
) -> Iterator[tuple[str, int | str | bytes]]:
    """Yield the fields of a blob's hash: its size and version, then its parts by number."""
    yield _SIZE, nbytes
    yield _VERSION, version
    for number, part in enumerate(_parts(pieces)):
        yield str(number), part


def _parts(pieces: Iterable[memoryview]) -> Iterator[bytes]:
    """Yield the same bytes, cut at multiples of PART_BYTES."""
    gathered: list[memoryview] = []
    missing = PART_BYTES
    for piece in pieces:
        start = 0
        while start < len(piece):
            taken = piece[start : start + missing]
            gathered.append(taken)
            start += len(taken)
            missing -= len(taken)
            if not missing:
                yield b"".join(gathered)
                gathered, missing = [], PART_BYTES
    if gathered:
        yield b"".join(gathered)


def _batches(items: Iterable[T], length: int) -> Iterator[tuple[T, ...]]:
    rest = iter(items)
    while batch := tuple(islice(rest, length)):
        yield batch


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches just this text."""
    return "".join(f"\\{character}" if character in "*?[]^-\\" else character for character in text)


def redis_tier(
    url: str,
    events: Events,
    *,
    prefix: str = "kvlinker",
    cipher: Cipher | None = None,
    codec: Codec = RAW,
) -> BlobTier:
    """Open a tier of chunks in a Redis server, under keys that begin with ``prefix``; the server
    need not be up.

    Raises StoreError for a URL that is none, or where redis-py is missing.
    """
    medium = RedisMedium(url, prefix=prefix, timeout=EXCHANGE_SECONDS)
    return BlobTier(
        "redis",
        medium,
        events,
        conceal=partial(redacted, url=url),
        sealing=sealing_of(cipher),
        codec=codec,
    )
