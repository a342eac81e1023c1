"""Keeps chunks in a Redis server that several kvlinker servers, and others, may share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from kvlinker.base.errors import StoreError
from kvlinker.base.events import Events
from kvlinker.base.types.chunks import CHUNK_KEY
from kvlinker.store.format.codecs import RAW, Codec, find_codec
from kvlinker.store.format.encryption import Cipher, Sealing
from kvlinker.store.redaction import place_of, redacted
from kvlinker.store.tiers import redis_scripts
from kvlinker.store.tiers.base import Tier
from kvlinker.store.tiers.configured import SCRATCH, ConfiguredTier, register
from kvlinker.store.tiers.medium import (
    BlobDamaged,
    BlobGone,
    MediumRefused,
    MediumUnavailable,
    MediumUsage,
    WriteOutcome,
)
from kvlinker.store.tiers.remote import EXCHANGE_SECONDS, BlobTier, emptied, missing_library

PART_BYTES = 1 << 20
"""The bytes of a blob that one field of its hash holds."""

_PARTS_PER_COMMAND = 8
_KEYS_PER_SCRIPT = 500
_TEMPORARY_SECONDS = 60

T = TypeVar("T")


class RedisMedium:
    """Keeps each blob as a hash, under keys that begin with ``<prefix>:``; no other key is ever
    touched.

    Sizes and last uses are kept in Redis itself (see ``redis_scripts``), so that the budget holds
    however many servers share it.

    Blobs that another program, or Redis itself, changed or evicted are found when they are used, or
    by ``audit``.
    """

    ahead_bytes = 2 * PART_BYTES

    def __init__(self, url: str, budget_bytes: int, *, prefix: str, timeout: float) -> None:
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
        self.budget_bytes = int(
            budget_bytes
        )  # hiredis packs no subclass of int, such as settings have
        self._prefix = f"{prefix}:"
        self._blobs = f"{prefix}:chunk:"
        self._temporary = f"{prefix}:temporary:"
        self._accounting = [f"{prefix}:{name}" for name in ("uses", "sizes", "totals")]
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
        self._scripts = {
            text: self._redis.register_script(text)
            for name, text in vars(redis_scripts).items()
            if name.isupper() and not name.startswith("_")
        }

    def open(self) -> tuple[int, ...]:
        return _sizes(self._run(redis_scripts.EVICT, "", self.budget_bytes))

    def stat(self, key: str) -> int | None:
        return self._look(key, "look")

    def touch(self, key: str) -> int | None:
        return self._look(key, "use")

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        first, last = start // PART_BYTES, (start + len(target) - 1) // PART_BYTES
        position = 0
        skipped = start - first * PART_BYTES
        for numbers in _batches(range(first, last + 1), _PARTS_PER_COMMAND):
            with _translated():
                parts = self._redis.hmget(self._blobs + key, [str(number) for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                if part is None:
                    raise BlobGone
                wanted = memoryview(part)[skipped : skipped + len(target) - position]
                if number != last and skipped + len(wanted) != PART_BYTES:
                    raise BlobDamaged(
                        f"its part {number} has {len(part)} bytes instead of {PART_BYTES}"
                    )
                target[position : position + len(wanted)] = wanted
                position += len(wanted)
                skipped = 0
        if position != len(target):
            raise BlobDamaged(f"it ends {len(target) - position} bytes too early")

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> WriteOutcome:
        begin = partial(self._run, redis_scripts.BEGIN, key, nbytes, self.budget_bytes)
        evicted, answer = self._making_way(key, nbytes, begin)
        if answer is None:
            return WriteOutcome(stored=True, evicted=evicted)
        evicted += _sizes(answer)
        temporary = self._temporary + secrets.token_hex(16)
        try:
            for batch in _batches(enumerate(_parts(pieces)), _PARTS_PER_COMMAND):
                fields = {str(number): part for number, part in batch} | {"size": nbytes}
                more, _ = self._making_way(
                    key, nbytes, partial(self._write_parts, temporary, fields)
                )
                evicted += more
            stored = bool(self._run(redis_scripts.COMMIT, key, temporary=temporary))
        except BaseException:
            with suppress(MediumUnavailable, MediumRefused):
                self._run(redis_scripts.ABANDON, key, temporary=temporary)
            raise
        return WriteOutcome(stored, evicted)

    def delete(self, key: str) -> None:
        self._run(redis_scripts.DELETE, key)

    def keys(self) -> tuple[str, ...]:
        with _translated():
            names = self._redis.zrange(self._accounting[0], 0, -1)
        return tuple(
            name
            for name in (name.decode(errors="replace") for name in names)
            if CHUNK_KEY.fullmatch(name)
        )

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        found = self._run(redis_scripts.SIZES, "", *keys)
        return {
            key: int(size)
            for key, size in zip(keys, found, strict=True)
            if size is not None and size.isdigit()
        }

    def usage(self) -> MediumUsage:
        return MediumUsage(*self._run(redis_scripts.USAGE, ""))

    def audit(self) -> None:
        self._run(redis_scripts.MEND, "")
        self._reconcile()

    def clear(self) -> None:
        with _translated():
            found = self._redis.scan_iter(match=_literal(self._prefix) + "*", count=1000)
            for batch in _batches(found, _KEYS_PER_SCRIPT):
                self._redis.unlink(*batch)

    def close(self) -> None:
        self._redis.close()

    def _look(self, key: str, purpose: str) -> int | None:
        size = self._run(redis_scripts.LOOK, key, PART_BYTES, purpose)
        if size == -1:
            raise BlobDamaged("what lies under its key is not a blob, or not a whole one")
        return None if size is None else int(size)

    def _write_parts(self, temporary: str, fields: dict[str, Any]) -> None:
        with _translated():
            pipeline = self._redis.pipeline()  # a transaction: no part is ever without its end
            pipeline.hset(temporary, mapping=fields)
            pipeline.expire(temporary, _TEMPORARY_SECONDS)
            pipeline.execute()

    def _making_way(
        self, key: str, nbytes: int, step: Callable[[], Any]
    ) -> tuple[tuple[int, ...], Any]:
        """Do a step of a write; where Redis has no memory left, do it once more after evicting as
        much of our own."""
        try:
            return (), step()
        except _OutOfMemory:
            evicted = _sizes(self._run(redis_scripts.MAKE_WAY, key, nbytes))
            if not evicted:
                raise
            return evicted, step()

    def _run(self, script: str, key: str, *arguments: object, temporary: str | None = None) -> Any:
        """Run a script; if the accounting was overwritten, repair it and run the script once
        more."""
        keys = [*self._accounting, *([temporary] if temporary else [])]
        values: list[Any] = [self._blobs, key, *arguments]
        try:
            with _translated():
                return self._scripts[script](keys=keys, args=values)
        except _OutOfMemory:
            raise
        except MediumRefused:
            with _translated():
                mended = self._scripts[redis_scripts.MEND](keys=keys, args=[self._blobs, ""])
            if not mended:
                raise
        self._reconcile()
        with _translated():
            return self._scripts[script](keys=keys, args=values)

    def _reconcile(self) -> None:
        """Make the accounting agree with all blobs that are there."""
        with _translated():
            found = self._redis.scan_iter(match=_literal(self._blobs) + "*", count=1000)
            names = {name.removeprefix(self._blobs.encode()) for name in found}
            names |= set(self._redis.zrange(self._accounting[0], 0, -1))
            names |= set(self._redis.hkeys(self._accounting[1]))
        for batch in (*_batches(sorted(names), _KEYS_PER_SCRIPT), ()):
            step = "" if batch else "last"
            with _translated():
                self._scripts[redis_scripts.RECONCILE](
                    keys=self._accounting, args=[self._blobs, "", step, *batch]
                )


class _OutOfMemory(MediumRefused):
    """Redis is at its memory limit."""


@contextmanager
def _translated() -> Iterator[None]:
    """Raise redis-py's exceptions as a medium's."""
    from redis import exceptions

    try:
        yield
    except exceptions.OutOfMemoryError as error:
        raise _OutOfMemory(_reason(error)) from error
    except exceptions.ResponseError as error:
        raise MediumRefused(_reason(error)) from error
    except (exceptions.RedisError, OSError) as error:
        raise MediumUnavailable(_reason(error)) from error


def _reason(error: Exception) -> str:
    """Return what went wrong, without the command, which redis-py puts before it: that may hold
    parts of a chunk."""
    return str(error).rpartition("caused error: ")[2]


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


def _sizes(answer: Sequence[int] | None) -> tuple[int, ...]:
    return tuple(int(size) for size in answer or ())


def _literal(text: str) -> str:
    """Return a pattern of Redis that matches just this text."""
    return "".join(f"\\{character}" if character in "*?[]^-\\" else character for character in text)


def redis_tier(
    url: str,
    budget_bytes: int,
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
    medium = RedisMedium(url, budget_bytes, prefix=prefix, timeout=EXCHANGE_SECONDS)
    return BlobTier(
        "redis",
        medium,
        events,
        conceal=partial(redacted, url=url),
        sealing=Sealing(cipher),
        codec=codec,
    )


@register
class ConfiguredRedis(ConfiguredTier):
    """Keeps chunks in the Redis server that ``redis_url`` names."""

    name = "redis"
    rank = 30
    settings = ("redis_url", "redis_space", "redis_codec", "redis_prefix")

    @property
    def budget_bytes(self) -> int:
        return 0 if self.setup.settings.redis_url is None else self.setup.settings.redis_space

    @property
    def codec(self) -> Codec:
        return find_codec(self.setup.settings.redis_codec)

    def open(self) -> Tier:
        return self._opened(self.budget_bytes, self.setup.events, self.setup.settings.redis_prefix)

    def scratch(self, budget_bytes: int) -> AbstractContextManager[Tier]:
        return emptied(
            self._opened(budget_bytes, Events(), f"{self.setup.settings.redis_prefix}:{SCRATCH}")
        )

    @property
    def _url(self) -> str:
        url = self.setup.settings.redis_url
        assert url is not None  # else it is left out
        return url.get_secret_value()

    def _opened(self, budget_bytes: int, events: Events, prefix: str) -> BlobTier:
        cipher = self.setup.cipher
        return redis_tier(
            self._url, budget_bytes, events, prefix=prefix, cipher=cipher, codec=self.codec
        )
