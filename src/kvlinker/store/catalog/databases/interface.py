"""The database interface of the catalog. Its SQL is written once, in the common subset of SQLite
and PostgreSQL; the differences are here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Values = Mapping[str, Any] | Sequence[Any]
"""The values of a statement: by name for ``:name``, in order for ``?``."""


class Rows(Protocol):
    """The rows that a statement has returned."""

    def fetchone(self) -> Any: ...

    def fetchall(self) -> list[Any]: ...

    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """Runs the statements of one transaction."""

    @property
    def texts(self) -> Texts: ...

    def execute(self, statement: str, values: Values = ..., /) -> Rows: ...

    def executemany(self, statement: str, values: Iterable[Values], /) -> object: ...


class Texts(Protocol):
    """Keeps the texts of chunks, each tenant's apart, and finds them by their words. A rank that
    weighs a word by the number of texts that have it, as BM25 does, must not reveal those of others
    to a tenant."""

    def insert(self, connection: Connection, tenant: str, chunk_key: str, text: str) -> int:
        """Keep the text of a tenant's chunk, which has none here; return its number."""

    def remove(self, connection: Connection, tenant: str, number: int | None) -> None:
        """Remove the text with this number of a tenant's chunk, which is gone; None for a chunk
        that has none."""

    def remove_all(self, connection: Connection) -> bool:
        """Remove the texts of all tenants; return whether there were any."""

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
        """Return the best of the tenant's chunks of a model that have any of the words: rows of
        context cache id, score, text, tokens and metadata. ``condition`` is one of context caches
        ``c``, of which the newest stands for a chunk; its ``values`` are by name."""


class StateLock(Protocol):
    """Locks the files of one catalog, shared or exclusively; a lock ends with the process."""

    def share(self) -> None:
        """Share the lock with other processes. Raises StoreError if another process keeps it
        exclusively for long."""

    def take_alone(self, patience: float = 0.0) -> None:
        """Acquire the lock exclusively. Raises StoreError if others hold it for longer than
        ``patience`` seconds."""

    def close(self) -> None:
        """Release the lock. Idempotent."""


class Database(Protocol):
    """Runs queries and transactions. Methods may be called from any thread; all raise StoreError
    when the database fails. Transactions are one after another, whichever process runs them: so no
    limit can be passed, and none waits for two locks."""

    @property
    def place(self) -> str:
        """The name of the catalog in messages: a path, or a URL without secrets."""

    @property
    def texts(self) -> Texts: ...

    def query(self, statement: str, values: Values) -> Sequence[Any]:
        """Return all rows of a SELECT."""

    def transaction(self) -> AbstractContextManager[Connection]:
        """Run a transaction: everything in the block happens, or nothing does. It survives the end
        of this process at once, and a power cut after ``persist``."""

    def lock(self) -> StateLock:
        """Return a lock of this catalog, which is not taken yet."""

    def compact(self) -> None:
        """Rewrite the tables, so that no changed or deleted data remains."""

    def persist(self) -> None:
        """Wait until the disk has every transaction that has ended. Others need not wait
        meanwhile."""

    def check(self) -> Sequence[str]:
        """Return the database's own findings of damage, a line for each."""

    def close(self) -> None:
        """Close the database. Idempotent; no other method may be called afterwards."""
