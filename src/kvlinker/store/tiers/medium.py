"""What the remote tier needs of a place for bytes, and how it deals with one that is slow or down."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar
from urllib.parse import unquote

KEYS_AT_ONCE = 1000
"""That a medium is asked about in one question."""


class MediumUnavailable(Exception):  # noqa: N818 - a state, told to the availability
    """The medium does not answer, or not sensibly; the message says how."""


class MediumRefused(Exception):  # noqa: N818
    """The medium answered that it will not do this: it is full, read-only, or not allowed. It may do other things."""


class BlobGone(Exception):  # noqa: N818
    """The blob vanished while it was read: evicted or deleted by somebody."""


class BlobDamaged(Exception):  # noqa: N818
    """What lies under the key cannot be a blob that was written whole; the message says why."""


@dataclass(frozen=True, slots=True)
class MediumUsage:
    """How full a medium is, with what all servers keep there."""

    used_bytes: int
    blobs: int


@dataclass(frozen=True, slots=True)
class Written:
    """``evicted``: sizes in bytes of the blobs that made room."""

    stored: bool
    evicted: tuple[int, ...] = ()


class BlobMedium(Protocol):
    """Blobs under chunk keys, the least recently used of all servers evicted first.

    Blobs appear whole or not at all. Methods may be called from any thread and may wait for a network; each raises
    MediumUnavailable and MediumRefused, and leaves the medium consistent when it does.
    """

    @property
    def place(self) -> str:
        """Where it is, without credentials, for logs."""
        ...

    @property
    def budget_bytes(self) -> int: ...

    def open(self) -> tuple[int, ...]:
        """Reach the medium and evict down to the budget, also again after an outage; returns evicted sizes."""
        ...

    def stat(self, key: str) -> int | None:
        """The blob's size in bytes, or None. Raises BlobDamaged."""
        ...

    def touch(self, key: str) -> int | None:
        """As ``stat``; the blob is now the most recently used."""
        ...

    def read_into(self, key: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the blob's bytes from ``start`` on. Raises BlobGone and BlobDamaged."""
        ...

    def write(self, key: str, nbytes: int, pieces: Iterable[memoryview]) -> Written:
        """Keep a blob of ``nbytes``, at most the budget, evicting for it. One that is there already stays."""
        ...

    def delete(self, key: str) -> None:
        """Remove whatever lies under the key."""
        ...

    def keys(self) -> tuple[str, ...]:
        """Least recently used first."""
        ...

    def sizes(self, keys: Sequence[str]) -> dict[str, int]:
        """Bytes of those of the keys that are accounted here, in one question; at most KEYS_AT_ONCE."""
        ...

    def usage(self) -> MediumUsage: ...

    def audit(self) -> None:
        """Make keys and usage agree with the blobs that are there."""
        ...

    def clear(self) -> None:
        """Remove everything that lies in this place, whoever put it there, and the place itself."""
        ...

    def close(self) -> None:
        """Idempotent."""
        ...


T = TypeVar("T")

_MOST_CALLS = 32


class Deadline:
    """Runs calls in threads of their own, so that one that hangs holds up nobody, not even the process's end."""

    def __init__(self) -> None:
        self._places = threading.Semaphore(_MOST_CALLS)

    def call(self, function: Callable[[], T], seconds: float) -> T:
        """The function's result. Raises TimeoutError when there is none in time (the call goes on unattended, and
        takes one of a limited number of places until it ends), and what the function raises.
        """
        started = time.monotonic()
        if not self._places.acquire(timeout=seconds):
            raise TimeoutError
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(function())
            except BaseException as error:
                result.set_exception(error)
            finally:
                self._places.release()

        try:
            threading.Thread(target=run, name="kvlinker-remote", daemon=True).start()
        except BaseException:
            self._places.release()
            raise
        return result.result(timeout=max(0.0, started + seconds - time.monotonic()))


logger = logging.getLogger(__name__)

_LONGEST_PAUSE = 60.0


class Availability:
    """After a failure the medium is down: nobody asks it, until a thread of its own finds that it answers again.

    It is tried after ``pause`` seconds, and after twice as long each time as long as nothing but the trials succeeds,
    up to a minute. The start and the end of an outage are logged.
    """

    def __init__(self, name: str, place: str, trial: Callable[[], bool], *, pause: float) -> None:
        """``trial``: reach the medium, saying whether it answers; never raises."""
        self._name = name
        self._place = place
        self._trial = trial
        self._first_pause = self._pause = pause
        self._lock = threading.Lock()
        self._up = True
        self._closed = threading.Event()

    @property
    def up(self) -> bool:
        return self._up

    def failed(self, reason: str) -> None:
        """A call failed; only the first failure of an outage does anything."""
        with self._lock:
            if not self._up or self._closed.is_set():
                return
            self._up = False
        logger.warning(
            "Tier %s (%s) is left alone for now, and tried again every few seconds: %s", self._name, self._place, reason
        )
        threading.Thread(target=self._watch, name=f"kvlinker-{self._name}-watch", daemon=True).start()

    def succeeded(self) -> None:
        """A chunk was read or written: the next outage begins with a short pause again."""
        self._pause = self._first_pause

    def close(self) -> None:
        """Try no more. Idempotent."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(self._pause):
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            if self._trial():
                self._up = True
                logger.warning("Tier %s (%s) answers again", self._name, self._place)
                return


_USERINFO = re.compile(r"(?<=://)[^\s?#]*@")
_SECRET_PARAMETER = re.compile(
    r"[?&#][^=&#]*(?:pass|pwd|secret|token|key|sig|auth|cred)[^=&#]*=([^&#]+)", re.IGNORECASE
)
_HIDDEN = "***"


def place_of(url: str) -> str:
    """The URL without user, password, query and fragment."""
    return _USERINFO.sub("", re.split(r"[?#]", url, maxsplit=1)[0])


def redacted(text: str, url: str) -> str:
    """``text`` with the URL's password, and what else in it looks like a secret, hidden wherever it stands."""
    text = text.replace(url, place_of(url))
    for secret in sorted(_secrets(url), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _secrets(url: str) -> Iterator[str]:
    """Found without trusting the URL to be a valid one; as written and as meant."""
    found = [match[1] for match in _SECRET_PARAMETER.finditer(url)]
    for userinfo in _USERINFO.findall(url):
        _, _, password = userinfo[:-1].rpartition(":") if ":" in userinfo else ("", "", userinfo[:-1])
        found.append(password)
    for secret in found:
        yield from {secret, unquote(secret)} - {""}
