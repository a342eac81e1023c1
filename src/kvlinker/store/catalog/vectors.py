"""Finds chunks by the meaning of their texts: keeps a vector for each, by embedding model; the
catalog has one such index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from kvlinker.store.catalog.blobs import TokenBlobs
from kvlinker.store.catalog.databases.interface import Database
from kvlinker.store.catalog.rows import CHUNK_COLUMNS, SEARCHED, read_tokens, with_pairs

VECTOR = np.dtype("<f4")
"""How a vector's numbers are stored."""

KEYS_PER_QUERY = 500
"""The chunks that are looked up at once, the nearest first; chosen by hand."""

VECTORS_PER_QUERY = 5000
"""The vectors that are read at once: those of many chunks take a lot of memory, and others wait for
the database meanwhile; chosen by hand."""


class VectorIndex:
    """Keeps the vectors of chunks, which have length 1. Those of one embedding model, which its
    fingerprint names, are never compared with another's. All methods may be called from any
    thread."""

    def __init__(self, database: Database, blobs: TokenBlobs) -> None:
        self._database = database
        self._blobs = blobs

    def add(self, embedder: str, vectors: Mapping[str, NDArray[np.float32]]) -> None:
        """Keep the vectors of chunks, by chunk key; chunks that are gone or have theirs already are
        passed over."""
        with self._database.transaction() as connection:
            connection.executemany(
                "INSERT INTO vectors (tenant, embedder, key, vector) SELECT tenant, ?, key, ?"
                " FROM chunks WHERE key = ? ON CONFLICT DO NOTHING",
                [(embedder, v.astype(VECTOR).tobytes(), key) for key, v in vectors.items()],
            )

    def missing(self, embedder: str, fingerprint: str, *, limit: int) -> dict[str, tuple[int, ...]]:
        """Return the token ids of up to ``limit`` chunks of a model that have a text in the search
        index, but no vector, by chunk key."""
        rows = self._database.query(
            f"SELECT {CHUNK_COLUMNS} FROM chunks k WHERE k.fingerprint = :fingerprint"
            " AND k.text_number IS NOT NULL AND NOT EXISTS (SELECT 1 FROM vectors v"
            " WHERE v.key = k.key AND v.embedder = :embedder) LIMIT :limit",
            {"fingerprint": fingerprint, "embedder": embedder, "limit": limit},
        )
        return read_tokens(rows, self._blobs)

    def nearest(
        self,
        vector: NDArray[np.float32],
        *,
        embedder: str,
        tenant: str,
        fingerprint: str,
        now: float,
        limit: int,
        metadata: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[str, ...]:
        """Return the ids of the tenant's ``limit`` chunks whose vectors are nearest to ``vector``
        (by cosine), the nearest first; which of them, and by which context caches, is as in
        ``SearchIndex.search``."""
        compared, nearness = self._compare(vector, embedder=embedder, tenant=tenant)
        order = np.argsort(-nearness, kind="stable").tolist()
        conditions, values = with_pairs(metadata)
        found: list[str] = []
        for start in range(0, len(order), KEYS_PER_QUERY):
            keys = [compared[place] for place in order[start : start + KEYS_PER_QUERY]]
            ids = dict(
                self._database.query(
                    "SELECT k.key, h.id FROM chunks k INDEXED BY chunks_by_tenant JOIN"
                    " context_caches h ON h.number = (SELECT max(c.number) FROM context_caches c"
                    f" WHERE c.chunk_key = k.key AND {' AND '.join([SEARCHED, *conditions])}) WHERE"
                    " k.tenant = :tenant AND k.key IN (SELECT value FROM json_each(:keys)) AND"
                    " k.fingerprint = :fingerprint",
                    {
                        **values,
                        "tenant": tenant,
                        "keys": json.dumps(keys),
                        "fingerprint": fingerprint,
                        "now": now,
                    },
                )
            )
            found += [ids[key] for key in keys if key in ids]
            if len(found) >= limit:
                break
        return tuple(found[:limit])

    def _compare(
        self, vector: NDArray[np.float32], *, embedder: str, tenant: str
    ) -> tuple[list[str], NDArray[np.float32]]:
        """Return the keys of all of the tenant's chunks that have vectors, and the products of
        these with ``vector``."""
        keys: list[str] = []
        products: list[NDArray[np.float32]] = []
        asked = {"tenant": tenant, "embedder": embedder, "limit": VECTORS_PER_QUERY}
        while rows := self._database.query(
            "SELECT key, vector FROM vectors WHERE tenant = :tenant AND embedder = :embedder AND"
            " key > :last ORDER BY key LIMIT :limit",
            {**asked, "last": keys[-1] if keys else ""},
        ):
            keys += [key for key, _ in rows]
            stored = np.frombuffer(b"".join(row[1] for row in rows), VECTOR)
            products.append(stored.reshape(len(rows), -1) @ vector)
        return keys, np.concatenate(products) if products else np.empty(0, np.float32)
