"""The catalog in an SQLite file: the default, for one machine."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvlinker.base.errors import StoreError
from kvlinker.store.catalog.databases.interface import Connection, Database, Values
from kvlinker.store.catalog.databases.schema import ACCOUNTS, SCHEMA_VERSION, TABLES
from kvlinker.store.catalog.databases.state_lock import DirectoryLock
from kvlinker.store.format.durability import synchronize

_BUSY_SECONDS = 10.0
"""The seconds that a statement waits for another process's lock; chosen by hand."""

_CHECKED_AT_ONCE_BYTES = 64 << 20
"""Files up to this size are checked when they are opened; reading all of a larger one would hold up
the start; chosen by hand."""

_FORGETS_AT_ONCE = (3, 42, 0)
"""The version of SQLite from which FTS5 removes a deleted text's words at once; before, they go in
later merges."""

TOKENIZE = "porter unicode61"
"""How FTS5 splits texts into words: English stems, no accents."""


class FTS5Texts:
    """SQLite implementation of Texts, by FTS5."""

    def insert(self, connection: Connection, tenant: str, chunk_key: str, text: str) -> int:
        connection.execute(
            f"INSERT INTO {_table_of(connection, tenant)} (text) VALUES (?)", (text,)
        )
        (number,) = connection.execute("SELECT last_insert_rowid()").fetchone()
        return int(number)

    def remove(self, connection: Connection, tenant: str, number: int | None) -> None:
        if number is not None:
            connection.execute(
                f"DELETE FROM {_table_of(connection, tenant)} WHERE rowid = ?", (number,)
            )

    def remove_all(self, connection: Connection) -> bool:
        numbers = connection.execute("SELECT number FROM search_indexes").fetchall()
        for (number,) in numbers:
            connection.execute(f"DROP TABLE IF EXISTS {_table_name(number)}")
        connection.execute("DELETE FROM search_indexes")
        connection.execute("UPDATE chunks SET text_number = NULL WHERE text_number IS NOT NULL")
        return bool(numbers)

    def find(
        self,
        database: Database,
        words: Sequence[str],
        *,
        tenant: str,
        fingerprint: str,
        condition: str,
        values: Mapping[str, Any],
        limit: int,
    ) -> Sequence[Any]:
        found = database.query(
            "SELECT number FROM search_indexes WHERE tenant = :tenant", {"tenant": tenant}
        )
        if not found:
            return ()
        table = _table_name(found[0][0])
        return database.query(
            f"SELECT h.id, -t.rank, t.text, k.length, h.metadata FROM {table} t CROSS JOIN chunks k"
            " ON k.tenant = :tenant AND k.text_number = t.rowid AND k.fingerprint = :fingerprint"
            " CROSS JOIN context_caches h ON h.number = (SELECT max(c.number) FROM context_caches"
            f" c WHERE c.chunk_key = k.key AND {condition}) WHERE {table} MATCH :match"
            " ORDER BY t.rank LIMIT :limit",
            {
                **values,
                "tenant": tenant,
                "fingerprint": fingerprint,
                "match": " OR ".join(f'"{word}"' for word in words),
                "limit": limit,
            },
        )


class SQLiteConnection(sqlite3.Connection):
    """SQLite implementation of Connection, for one transaction."""

    texts = FTS5Texts()


class SQLiteDatabase:
    """SQLite implementation of Database, in a file.

    SQLite does not wait for the disk while others wait for the lock: a power cut before ``persist``
    loses the last transactions, whole ones from the end, and damages nothing.
    """

    texts = SQLiteConnection.texts

    def __init__(self, path: Path) -> None:
        """Open or create the file. Raises StoreError if it is damaged, foreign or of another
        schema."""
        self._path = path
        self.place = str(path)
        self._lock = threading.Lock()
        self._log_identity: tuple[int, int] | None = (
            None  # of the write-ahead log whose name is on the disk
        )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if (
                not path.exists()
            ):  # closing the file would take away locks that this process has on it
                path.touch(mode=0o600)
            self._connection = sqlite3.connect(
                path,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                factory=SQLiteConnection,
            )
            # as PostgreSQL calls what SQLite calls max and min
            self._connection.create_function("greatest", 2, max, deterministic=True)
            self._connection.create_function("least", 2, min, deterministic=True)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"The catalog {path} cannot be opened: {error}. Choose another state directory."
            ) from error
        try:
            self._identity = _identify(path)
            self._open()
        except BaseException:
            self._connection.close()
            raise

    def query(self, statement: str, values: Values) -> Sequence[Any]:
        try:
            with self._lock:
                return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._store_error(error) from error

    @contextmanager
    def transaction(self) -> Iterator[SQLiteConnection]:
        with self._lock, self._errors():
            if _identify(self._path) != self._identity:
                raise StoreError(
                    f"The catalog {self._path} was removed or replaced while it was in use:"
                    " changes would be lost. Restart kvlinker; it continues with the file that"
                    " is there, or makes a new one."
                )
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                # a later kvlinker may have upgraded the file since it was opened
                self._check_version()
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def lock(self) -> DirectoryLock:
        return DirectoryLock(self._path.parent)

    def compact(self) -> None:
        with self._lock, self._errors():
            self._connection.execute("VACUUM")
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def persist(self) -> None:
        try:
            with suppress(
                FileNotFoundError
            ):  # then SQLite has moved it all to the file, and synchronised that
                log = self._path.with_name(f"{self._path.name}-wal")
                synchronize(log)
                identity = _identify(log)
                if identity != self._log_identity:
                    synchronize(log.parent)
                    self._log_identity = identity
        except OSError as error:
            raise StoreError(
                f"The catalog {self._path} was not written to the disk: {error}."
            ) from error

    def check(self) -> Sequence[str]:
        """Return SQLite's findings of damage in the whole file, which takes time for large ones."""
        with self._lock, self._errors():
            faults = [
                fault
                for (fault,) in self._connection.execute("PRAGMA integrity_check")
                if fault != "ok"
            ]
            keys = self._connection.execute("PRAGMA foreign_key_check").fetchall()
        return (
            *faults,
            *(
                f"row {row} of {table} refers to nothing in {parent}"
                for table, row, parent, _ in keys
            ),
        )

    def close(self) -> None:
        with suppress(StoreError):
            self.persist()
        with self._lock:
            self._connection.close()

    def _open(self) -> None:
        with self._errors():
            self._check_version()
            self._use_write_ahead_log()
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute("PRAGMA foreign_keys = ON")
            self._connection.execute(
                "PRAGMA secure_delete = ON"
            )  # deleted token ids do not stay in free pages
            small = self._path.stat().st_size <= _CHECKED_AT_ONCE_BYTES
            faults = (
                self._connection.execute("PRAGMA quick_check(1)").fetchall() if small else [("ok",)]
            )
            if faults != [("ok",)]:
                raise sqlite3.DatabaseError(faults[0][0])
        with self.transaction() as connection:
            if not self._check_version():
                _create(connection)

    def _use_write_ahead_log(self) -> None:
        """Switch to the write-ahead log, the one thing for which SQLite does not wait until others
        are done."""
        deadline = time.monotonic() + _BUSY_SECONDS
        while True:
            try:
                self._connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(0.005)

    def _check_version(self) -> int:
        """Return the file's schema version, 0 for an empty file. Raises StoreError if this build
        cannot use it."""
        # one statement sees one state of the file, even while another process creates the tables
        version, tables = self._connection.execute(
            "SELECT user_version, (SELECT count(*) FROM sqlite_master) FROM pragma_user_version"
        ).fetchone()
        if version == 0 and tables:
            raise StoreError(
                f"{self._path} is another program's database. Choose another state directory."
            )
        if version not in (0, SCHEMA_VERSION):
            age = "an older" if version < SCHEMA_VERSION else "a newer"
            raise StoreError(
                f"The catalog {self._path} was written by {age} kvlinker: it has schema {version},"
                f" and this kvlinker reads only schema {SCHEMA_VERSION}. Use the kvlinker that"
                " wrote it, or choose another state directory, into which `kvlinker caches import"
                f" {self._path}` brings what can be read."
            )
        return int(version)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise SQLite's errors as StoreErrors."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._store_error(error) from error

    def _store_error(self, error: sqlite3.Error) -> StoreError:
        """Return the StoreError that names the file and the way out."""
        if isinstance(
            error, (sqlite3.OperationalError, sqlite3.IntegrityError, sqlite3.ProgrammingError)
        ):
            return StoreError(f"The catalog {self._path} failed: {error}.{_way_out(error)}")
        return StoreError(
            f"The catalog {self._path} is damaged: {error}. Move it away (with its -wal and"
            " -shm files) and start again: a new one is made, and the context caches of the"
            " old one have to be created again."
        )


def _way_out(error: sqlite3.Error) -> str:
    """Return a sentence with the way out, and a space before it; empty if the error alone says
    it."""
    primary = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF
    if primary == sqlite3.SQLITE_FULL:
        return " Free some room on its disk; what is kept there is not lost meanwhile."
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN):
        return " Look whether its disk has room and this user may write to it."
    return ""


def _identify(path: Path) -> tuple[int, int] | None:
    """Return device and inode of the file that lies there, None for none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _create(connection: sqlite3.Connection) -> None:
    """Make an empty file a catalog, inside the caller's transaction."""
    for statement in TABLES:
        connection.execute(statement)
    for name, (table, event, statement) in ACCOUNTS.items():
        statement = statement.replace("unixepoch()", "CAST(strftime('%s', 'now') AS INTEGER)")
        connection.execute(f"CREATE TRIGGER {name} AFTER {event} ON {table} BEGIN {statement}; END")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _table_of(connection: Connection, tenant: str) -> str:
    """Return the name of the tenant's table, which is made where it is missing."""
    row = connection.execute(
        "SELECT number FROM search_indexes WHERE tenant = ?", (tenant,)
    ).fetchone()
    if row is not None:
        return _table_name(row[0])
    (number,) = connection.execute(
        "INSERT INTO search_indexes (tenant) VALUES (?) RETURNING number", (tenant,)
    ).fetchone()
    table = _table_name(number)
    connection.execute(f"CREATE VIRTUAL TABLE {table} USING fts5(text, tokenize = '{TOKENIZE}')")
    if sqlite3.sqlite_version_info >= _FORGETS_AT_ONCE:
        connection.execute(f"INSERT INTO {table} ({table}, rank) VALUES ('secure-delete', 1)")
    return table


def _table_name(number: int) -> str:
    """Name the table of the search index with this number."""
    return f"texts_{number}"
