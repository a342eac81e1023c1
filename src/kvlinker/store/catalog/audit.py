"""Keeps the findings of audits in the catalog, so that all servers that share it have the same:
samples in one order, and the state before them."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from kvlinker.base.errors import StoreError
from kvlinker.store.catalog.databases.interface import Database


@dataclass(frozen=True, slots=True)
class AuditSample:
    """A sample, as its server wrote it."""

    number: int
    server: str
    content: str


@dataclass(frozen=True, slots=True)
class AuditPart:
    """The state after a number that a reader knows."""

    pool: str
    """A name of the state, which no other catalog has."""

    upto: int
    """The number of the last sample that ``state`` is made of."""

    state: str | None
    """Takes the place of the samples up to there; None if the reader knows those."""

    samples: tuple[AuditSample, ...]
    """The samples after both, in their order."""


class AuditLog:
    """The samples of each model, by its fingerprint. Numbers grow in the order in which servers
    wrote, for transactions are one after another. Raises StoreError as the catalog does."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def begin(self, fingerprint: str) -> None:
        """Make room for a model's samples, where there is none yet."""
        with self._database.transaction() as connection:
            connection.execute(
                "INSERT INTO audit_states VALUES (:fingerprint, :pool, 0, NULL)"
                " ON CONFLICT (fingerprint) DO NOTHING",
                {"fingerprint": fingerprint, "pool": secrets.token_hex(8)},
            )

    def append(self, fingerprint: str, server: str, contents: Sequence[str]) -> None:
        """Write samples of a server."""
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO audit_samples (fingerprint, server, content) VALUES (?, ?, ?)",
                [(fingerprint, server, content) for content in contents],
            )

    def since(self, fingerprint: str, number: int) -> AuditPart:
        """Return the changes after a sample's number, from one moment; ``begin`` was called
        before."""
        rows = self._database.query(
            "SELECT upto, pool, CASE WHEN upto > :number THEN state END AS content, 0 AS kind"
            " FROM audit_states WHERE fingerprint = :fingerprint"
            " UNION ALL SELECT number, server, content, 1 FROM audit_samples"
            " WHERE fingerprint = :fingerprint AND number > :number ORDER BY 4, 1",
            {"fingerprint": fingerprint, "number": number},
        )
        if not rows:
            raise StoreError("The audit was removed from the catalog: restart this server.")
        (upto, pool, state, _), *samples = rows
        return AuditPart(pool, upto, state, tuple(AuditSample(*row[:3]) for row in samples))

    def replace(self, fingerprint: str, upto: int, state: str) -> None:
        """Keep ``state`` in the place of the samples up to this number, unless the kept state
        includes later ones."""
        values = {"fingerprint": fingerprint, "upto": upto, "state": state}
        with self._database.transaction() as connection:
            replaced = connection.execute(
                "UPDATE audit_states SET upto = :upto, state = :state"
                " WHERE fingerprint = :fingerprint AND upto < :upto RETURNING upto",
                values,
            ).fetchall()
            if replaced:
                connection.execute(
                    "DELETE FROM audit_samples WHERE fingerprint = :fingerprint"
                    " AND number <= :upto",
                    {"fingerprint": fingerprint, "upto": upto},
                )
