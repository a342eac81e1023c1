"""The catalog in a PostgreSQL database: one for all servers of a fleet."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import psycopg
from psycopg_pool import ConnectionPool, PoolTimeout

from kvlinker.base.errors import CatalogUnavailableError, InvalidRequestError, StoreError
from kvlinker.store.catalog.databases.interface import Values
from kvlinker.store.catalog.databases.postgresql_tables import (
    POSTGRES_VERSION,
    SCHEMA,
    PostgresTexts,
    create,
    exist,
    translated,
)
from kvlinker.store.catalog.databases.state_lock import (
    PATIENCE_SECONDS,
    TRY_AGAIN_SECONDS,
    in_use_error,
    rekeying_error,
)
from kvlinker.store.redaction import place_of, redacted

MOST_CONNECTIONS = 8
"""The most connections of one server; chosen by hand. Queries take a millisecond, so more
connections would only wait."""

CONNECT_SECONDS = 3.0
"""The seconds to wait for a connection; chosen by hand."""

OUTAGE_SECONDS = 1.0
"""The seconds after an outage without any attempt to connect, in which requests fail at once;
chosen by hand."""

LOCK_SECONDS = 10
"""The seconds that a transaction waits for earlier transactions; chosen by hand."""

READ_SECONDS = 4.0
"""The deadline of a read in seconds; chosen by hand. Reads take milliseconds."""

WRITE_SECONDS = 12.0
"""The deadline, in seconds, of a statement that writes or waits for earlier transactions; chosen by
hand, longer than ``LOCK_SECONDS``."""

_CONNECTION: dict[str, Any] = {
    "application_name": "kvlinker",
    "connect_timeout": round(CONNECT_SECONDS),
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,  # milliseconds
}
"""libpq's parameters: a host that is gone, or behind a cut network, is noticed in some ten
seconds."""

_WRITING, _USING = 0x6B766C01, 0x6B766C02
"""The keys of the advisory locks: of the one transaction that writes, and of the catalog's use."""

_SESSION = f"""SET search_path TO {SCHEMA};
    SET synchronous_commit = off;
    SET lock_timeout = '{LOCK_SECONDS}s';
    SET idle_in_transaction_session_timeout = '30s'"""
"""A server that stops inside a transaction keeps the others waiting for so long. Commits do not
wait for the disk: ``persist`` does."""

_OUTAGES = ("08", "57P", "53")
"""The classes of errors of a database that cannot be reached, is stopping, or has no room for a
connection."""

_LOCKED = "55P03"
"""The error of a lock that others hold for too long."""

_ANY_KEY = "any"

_COMPACTED = (
    *("chunks", "variants", "texts", "vectors"),
    *("responses", "response_items"),
)
"""The tables with callers' texts, in some form."""


R = TypeVar("R")


class SilentServerError(psycopg.OperationalError):
    """The server did not answer in time; the connection is closed."""


class PatientConnection(psycopg.Connection[Any]):
    """A connection with a deadline for each statement. A server that hangs still acknowledges what
    it gets, so that neither TCP nor a timeout of its own ends the waiting: only the client can."""

    _seconds = READ_SECONDS

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Set the deadline of each statement in the block to ``seconds``."""
        before, self._seconds = self._seconds, seconds
        try:
            yield
        finally:
            self._seconds = before

    def wait(self, gen: Generator[Any, Any, R], *options: Any, **named: Any) -> R:
        return super().wait(self._bound(gen), *options, **named)

    def _bound(self, work: Generator[Any, Any, R]) -> Generator[Any, Any, R]:
        """Yield what ``work`` waits for, which is sent what became ready: nothing, several times a
        second."""
        deadline = time.monotonic() + self._seconds
        try:
            wanted = next(work)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self.pgconn.finish()
                    raise SilentServerError(f"no answer in {self._seconds:g} seconds")
                wanted = work.send(ready)
        except StopIteration as end:
            result: R = end.value
            return result


class PostgresDatabase:
    """PostgreSQL implementation of Database, in the schema ``kvlinker``."""

    texts = PostgresTexts()

    def __init__(self, url: str) -> None:
        """Connect, and create the tables where they are missing. Raises StoreError if the URL is
        none, the tables are of another version or may not be created, and CatalogUnavailableError
        if the database does not answer."""
        logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # we say it ourselves
        self._url = url
        self.place = place_of(url)
        self._closed = False
        self._writing = threading.Lock()
        self._key: bytes | str | None = _ANY_KEY
        self._asked_again_at = 0.0
        self._silent = False  # it has not answered: one thread at a time asks again
        self._probing = threading.RLock()
        try:
            psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise StoreError(
                f"catalog_url is not a URL of PostgreSQL: {redacted(str(error), url).strip()}."
                " Write postgresql://user:password@host:5432/database."
            ) from None
        self._pool: Any = ConnectionPool(
            url,
            min_size=1,
            max_size=MOST_CONNECTIONS,
            connection_class=PatientConnection,
            kwargs={**_CONNECTION, "autocommit": True},
            configure=lambda connection: connection.execute(_SESSION),
            timeout=CONNECT_SECONDS,
            reconnect_timeout=CONNECT_SECONDS,
            open=False,
        )
        try:
            with self._errors():
                self._pool.open()
            self._create_tables()
        except BaseException:
            self._pool.close()
            raise

    def query(self, statement: str, values: Values) -> Sequence[Any]:
        with self._errors():
            try:
                rows: list[Any] = self._run_on_live_connection(
                    lambda connection: connection.execute(translated(statement), values).fetchall()
                )
            except psycopg.DataError:  # a value that no row can have, such as one with NUL
                return []
            return rows

    @contextmanager
    def transaction(self) -> Iterator[PostgresConnection]:
        # a thread that waited for another, which got no answer, fails at once and does not ask
        with self._writing_turn(), self._errors(), self._writing_connection() as connection:
            try:
                self._check_version(connection)
                yield PostgresConnection(connection)
                connection.execute("COMMIT")
            except BaseException:
                with suppress(psycopg.Error):
                    connection.execute("ROLLBACK")
                raise

    def lock(self) -> PostgresStateLock:
        return PostgresStateLock(self)

    def compact(self) -> None:
        with self._errors(), self._pool.connection() as connection, connection.patience(math.inf):
            for table in _COMPACTED:
                connection.execute(f"VACUUM (FULL) {table}")

    def persist(self) -> None:
        with self._errors():
            # an empty entry of the log, which is on the disk with all that stands before it
            self._run_on_live_connection(
                lambda connection: connection.execute(
                    "BEGIN; SET LOCAL synchronous_commit = on;"
                    " SELECT pg_logical_emit_message(true, 'kvlinker', ''); COMMIT"
                ),
                WRITE_SECONDS,
            )

    def check(self) -> Sequence[str]:
        """Return nothing: PostgreSQL has checksums and foreign keys of its own."""
        return ()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            with suppress(StoreError):
                self.persist()
            self._pool.close()

    def expect_key(self, *, any_key: bool) -> None:
        """Refuse transactions once the catalog is encrypted with another key than now: the lock
        that keeps others from changing it ends with its connection."""
        rows = () if any_key else self.query("SELECT sealed FROM encryption", {})
        self._key = _ANY_KEY if any_key else rows[0][0] if rows else None

    def connect(self) -> Any:
        """Return a connection outside the pool, which the caller closes."""
        with self._errors():
            return PatientConnection.connect(self._url, autocommit=True, **_CONNECTION)

    def _run_on_live_connection(
        self, work: Callable[[Any], Any], seconds: float | None = None
    ) -> Any:
        """Return the result of ``work`` with a connection; of another one, where it was cut since
        it was last used, as all are when PostgreSQL restarts. ``seconds`` is the patience with each
        statement, a read's by default."""
        seconds = READ_SECONDS if seconds is None else seconds
        for attempt in range(MOST_CONNECTIONS + 1):
            with self._pool.connection() as connection, connection.patience(seconds):
                try:
                    return work(connection)
                except psycopg.OperationalError as error:
                    if not self._was_cut(connection, error) or attempt == MOST_CONNECTIONS:
                        raise
        return None

    @contextmanager
    def _writing_connection(self) -> Iterator[Any]:
        """Yield a connection in a transaction without concurrent writers."""
        for attempt in range(MOST_CONNECTIONS + 1):
            with self._pool.connection() as connection:
                try:
                    connection.execute("BEGIN")
                except psycopg.OperationalError as error:
                    if not self._was_cut(connection, error) or attempt == MOST_CONNECTIONS:
                        raise
                    continue
                with connection.patience(WRITE_SECONDS):
                    connection.execute(f"SELECT pg_advisory_xact_lock({_WRITING})")
                    yield connection
                return

    def _was_cut(self, connection: Any, error: Exception) -> bool:
        """Return whether a connection ended before it was used, so that another one may do."""
        return connection.closed and not isinstance(error, SilentServerError)

    @contextmanager
    def _writing_turn(self) -> Iterator[None]:
        """Let one thread of this server write at a time, so that those that wait take one
        connection and not all."""
        if time.monotonic() < self._asked_again_at:
            raise self._unavailable("it did not a moment ago")
        if not self._writing.acquire(timeout=LOCK_SECONDS):
            raise self._unavailable("others have been writing for long")
        try:
            yield
        finally:
            self._writing.release()

    def _create_tables(self) -> None:
        """Make the tables where there are none: statements that change tables would wait for
        transactions of servers at work, and they for this one."""
        with self._errors():
            if not self._run_on_live_connection(exist):
                with self._writing_connection() as connection:
                    try:
                        create(connection)
                        connection.execute("COMMIT")
                    except BaseException:
                        with suppress(psycopg.Error):
                            connection.execute("ROLLBACK")
                        raise
        with self.transaction():
            pass

    def _check_version(self, connection: Any) -> None:
        """Raise StoreError unless the tables are of this build's version."""
        version, key = connection.execute(
            "SELECT number, (SELECT sealed FROM encryption) FROM version"
        ).fetchone()
        if version != POSTGRES_VERSION:
            age = "an older" if version < POSTGRES_VERSION else "a newer"
            raise StoreError(
                f"The catalog {self.place} was written by {age} kvlinker: it has schema {version},"
                f" and this kvlinker reads only schema {POSTGRES_VERSION}. Use the kvlinker that"
                f" wrote it, another database, or rename its schema (ALTER SCHEMA {SCHEMA} RENAME"
                " TO …): a new one is made, and the context caches have to be created again."
            )
        if self._key != _ANY_KEY and key != self._key:
            raise StoreError(
                f"The key of the catalog {self.place} was changed while it was in use: new"
                " data could not be read. Restart kvlinker with the new key."
            )

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise PostgreSQL's errors as StoreErrors that name the database and the way out."""
        probes = self._silent
        if time.monotonic() < self._asked_again_at or (
            probes and not self._probing.acquire(blocking=False)
        ):
            raise self._unavailable("it did not a moment ago")
        try:
            yield
            self._silent = False
        except PoolTimeout as error:
            self._silent = True
            self._asked_again_at = time.monotonic() + OUTAGE_SECONDS
            raise self._unavailable(self._reason(error)) from None
        except psycopg.DataError as error:
            raise InvalidRequestError(
                f"The catalog cannot hold this: {self._reason(error)}."
            ) from None
        except psycopg.Error as error:
            cut = isinstance(error, psycopg.OperationalError)
            state = error.sqlstate or ("08000" if cut else "")
            if state.startswith(_OUTAGES):
                self._silent = True
                self._asked_again_at = time.monotonic() + OUTAGE_SECONDS
            if state.startswith((*_OUTAGES, _LOCKED)):
                raise self._unavailable(self._reason(error)) from None
            raise StoreError(f"The catalog {self.place} failed: {self._reason(error)}.") from None
        finally:
            if probes:
                self._probing.release()

    def _unavailable(self, reason: str) -> CatalogUnavailableError:
        return CatalogUnavailableError(
            f"The catalog {self.place} does not answer: {reason}. Context caches cannot be looked"
            " up until it does; send texts, or try again."
        )

    def _reason(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return redacted(lines[0], self._url).rstrip(".")


class PostgresConnection:
    """PostgreSQL implementation of Connection, for one transaction."""

    texts = PostgresDatabase.texts

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def execute(self, statement: str, values: Values = ()) -> Any:
        return self._connection.execute(translated(statement), values or None)

    def executemany(self, statement: str, values: Iterable[Values]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(translated(statement), list(values))


class PostgresStateLock:
    """PostgreSQL implementation of StateLock: an advisory lock, which ends with its connection."""

    def __init__(self, database: PostgresDatabase) -> None:
        self._database = database
        self._connection = database.connect()
        self._held: str | None = None

    def share(self) -> None:
        if not self._try_lock("_shared", PATIENCE_SECONDS):
            raise rekeying_error(f"catalog {self._database.place}")
        self._database.expect_key(any_key=False)

    def take_alone(self, patience: float = 0.0) -> None:
        if not self._try_lock("", patience):
            raise in_use_error(f"catalog {self._database.place}")
        self._database.expect_key(any_key=True)

    def close(self) -> None:
        self._connection.close()

    def _try_lock(self, kind: str, patience: float) -> bool:
        """Release a lock that is held, then acquire this ``kind`` of it; return whether that was
        possible. Otherwise two processes that share the lock, and want it alone, would wait for
        each other."""
        deadline = time.monotonic() + patience
        if self._held is not None:
            self._connection.execute(f"SELECT pg_advisory_unlock{self._held}({_USING})")
            self._held = None
        while True:
            (taken,) = self._connection.execute(
                f"SELECT pg_try_advisory_lock{kind}({_USING})"
            ).fetchone()
            if taken:
                self._held = kind
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(TRY_AGAIN_SECONDS * (0.5 + random.random()))
