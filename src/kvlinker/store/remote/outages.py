"""Guards calls to a medium that may be slow or down: each has a deadline, and during an outage none
is made."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kvlinker.base.events import Events, TierUnavailable
from kvlinker.store.remote.medium import BlobDamaged, BlobGone, MediumRefused, MediumUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")

ANSWER_SECONDS = 2.0
"""The seconds without an answer after which a medium counts as not answering; chosen by hand."""

PAUSE_SECONDS = 3.0
"""The seconds from the beginning of an outage to the first trial; chosen by hand."""

_SLOWEST_BYTES_PER_SECOND = 10e6
"""The slowest transfer that is waited for; chosen by hand."""

_LONGEST_PAUSE = 60.0
"""The most seconds between two trials; chosen by hand."""

_MOST_CALLS = 32
"""The most calls at once, with those that hang; chosen by hand."""


class GuardedMedium:
    """Calls a medium as long as it answers.

    After a failure the medium counts as down: no call is made until a thread finds that it answers
    again. It is tried after ``pause_seconds``, and each failed trial doubles the pause, up to a
    minute. The start and the end of an outage are logged; every failure is published as
    TierUnavailable.
    """

    def __init__(
        self,
        tier: str,
        place: str,
        trial: Callable[[], None],
        events: Events,
        *,
        answer_seconds: float,
        pause_seconds: float,
        conceal: Callable[[str], str],
    ) -> None:
        """Begin with a medium that counts as up.

        ``trial`` calls it during an outage, through ``call``, and raises where it does not answer.
        ``conceal`` removes credentials from its error messages.
        """
        self._tier = tier
        self._place = place
        self._trial = trial
        self._events = events
        self._answer_seconds = answer_seconds
        self._first_pause = self._pause = pause_seconds
        self._conceal = conceal
        self._places = threading.Semaphore(_MOST_CALLS)
        self._lock = threading.Lock()
        self._up = True
        self._refusing = False
        self._closed = threading.Event()

    @property
    def up(self) -> bool:
        """False during an outage."""
        return self._up

    def ask(
        self,
        call: Callable[[], T],
        otherwise: T,
        *,
        nbytes: int = 0,
        seconds: float | None = None,
    ) -> T:
        """Return the call's result, or ``otherwise`` where the blob is gone, or the medium is down,
        fails or refuses.

        ``nbytes`` is the size of the transfer; ``seconds`` is the time limit of a call that takes
        longer by its nature. Raises BlobDamaged.
        """
        if not self._up:
            return otherwise
        try:
            return self.call(call, nbytes=nbytes, seconds=seconds)
        except BlobDamaged:
            raise
        except BlobGone:
            pass
        except MediumRefused as refusal:
            self._note_refusal(str(refusal))
        except Exception as error:  # a library's own: whatever it is, the medium is of no use now
            self._note_failure(error)
        return otherwise

    def call(self, call: Callable[[], T], *, nbytes: int = 0, seconds: float | None = None) -> T:
        """Return the call's result, whether the medium is up or not. Raises what the call raises,
        and TimeoutError if it does not return in time.

        Each call has a thread of its own, so that one that hangs blocks no other, nor the end of
        the process. One that is late goes on unattended, and takes one of a limited number of
        places until it ends.
        """
        seconds = self._answer_seconds if seconds is None else seconds
        seconds += nbytes / _SLOWEST_BYTES_PER_SECOND
        started = time.monotonic()
        if not self._places.acquire(timeout=seconds):
            raise TimeoutError
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(call())
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

    def note_transfer(self, *, written: bool = False) -> None:
        """Note that a chunk was read or written: the next outage begins with a short pause
        again."""
        self._pause = self._first_pause
        if written:
            self._refusing = False

    def close(self) -> None:
        """Stop the trials. Idempotent."""
        self._closed.set()

    def _note_refusal(self, reason: str) -> None:
        """Publish that the medium does not take chunks, and log it once, until it takes one
        again."""
        reason = self._conceal(reason)
        if not self._refusing:
            self._refusing = True
            logger.warning(
                "Tier %s (%s) does not take chunks for now: %s", self._tier, self._place, reason
            )
        self._events.publish(TierUnavailable(self._tier, reason))

    def _note_failure(self, error: Exception) -> None:
        """Begin an outage, unless one is under way, and publish the failure."""
        reason = self._conceal(str(error) or "no answer in time")
        if not isinstance(error, MediumUnavailable | TimeoutError):
            reason = f"{type(error).__name__}: {reason}"
        with self._lock:
            begins = self._up and not self._closed.is_set()
            if begins:
                self._up = False
        if begins:
            logger.warning(
                "Tier %s (%s) is left alone for now, and tried again every few seconds: %s",
                self._tier,
                self._place,
                reason,
            )
            threading.Thread(
                target=self._watch, name=f"kvlinker-{self._tier}-watch", daemon=True
            ).start()
        self._events.publish(TierUnavailable(self._tier, reason))

    def _watch(self) -> None:
        """Try the medium again and again until it answers."""
        while not self._closed.wait(self._pause):
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            try:
                self._trial()
            except Exception as error:
                reason = self._conceal(str(error) or "no answer in time")
                self._events.publish(TierUnavailable(self._tier, reason))
            else:
                self._up = True
                logger.warning("Tier %s (%s) answers again", self._tier, self._place)
                return
