"""Keeps which variants of a chunk are stored, how they depend on their context, and how much they
are reused."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.base.types.tenants import SHARED_TENANT
from kvlinker.store.catalog.blobs import TokenBlobs, variant_of
from kvlinker.store.catalog.databases.interface import Connection, Database
from kvlinker.store.eviction import MOST_REUSE, use_weight


@dataclass(frozen=True, slots=True)
class StoredVariant:
    """A variant of a chunk whose KV is in the store."""

    key: str
    """The key of its KV in the store."""
    prefix: tuple[int, ...]
    """The token ids that it was computed after."""
    contextualization: Contextualization


@dataclass(frozen=True, slots=True)
class VariantOwner:
    """Owns variants: one tenant's chunk under one model. A shared chunk's variants are each
    tenant's own, because they reveal the text before it."""

    fingerprint: str
    tenant: str
    content: str


class VariantIndex:
    """Keeps variants by owner, in the catalog's file. All methods may be called from any thread."""

    def __init__(self, database: Database, blobs: TokenBlobs) -> None:
        self._database = database
        self._blobs = blobs
        self._lock = threading.Lock()
        self._uses: defaultdict[str, float] = defaultdict(float)  # not yet written

    def find(self, owner: VariantOwner) -> tuple[StoredVariant, ...]:
        """Return all variants, the most reused first."""
        rows = self._database.query(
            "SELECT key, prefix, contextualization FROM variants WHERE fingerprint = :fingerprint"
            " AND tenant = :tenant AND content = :content ORDER BY reuse DESC, key",
            asdict(owner),
        )
        return tuple(
            StoredVariant(
                key, self._blobs.unpack(prefix, variant_of(key)), Contextualization.from_json(text)
            )
            for key, prefix, text in rows
        )

    def add(
        self, variants: Sequence[tuple[VariantOwner, StoredVariant]], *, limit: int
    ) -> tuple[str, ...]:
        """Record variants whose chunks a context cache holds; returns the keys that had to go, or
        may not stay, as ``Catalog.delete`` does.

        Of more than ``limit`` variants in all, those with the lowest f_r make room for the new
        ones, which begin one above them: f_r ages as tiers' priorities do (``EvictionIndex``).
        """
        with self._lock:
            uses, self._uses = self._uses, defaultdict(float)
        gone: list[str] = []
        with self._database.transaction() as connection:
            _write_uses(connection, uses)
            known = [variant for _, variant in variants if _exists(connection, variant.key)]
            evicted = _evict(connection, keep=max(0, limit - (len(variants) - len(known))))
            reuse = max(evicted.values(), default=0.0) + use_weight(1.0)
            gone += evicted
            for owner, variant in variants:
                if not _insert(connection, self._blobs, owner, variant, reuse):
                    gone.append(variant.key)
            gone += _evict(connection, keep=limit)
            note_released(connection, gone, time.time())
        return tuple(gone)

    def note_use(self, key: str, recomputed: float) -> None:
        """Add to the variant's f_r what a use that computes this share of it again counts; written
        with the next ``add``."""
        with self._lock:
            self._uses[key] += use_weight(recomputed)

    def forget(self, key: str) -> None:
        """Forget a variant whose KV is gone."""
        with self._database.transaction() as connection:
            connection.execute("DELETE FROM variants WHERE key = ?", (key,))


def note_released(connection: Connection, keys: Iterable[str], now: float) -> None:
    """Note these keys, so that ``Catalog.released`` returns them until no tier holds their KV."""
    connection.executemany(
        "INSERT INTO released VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET released_at ="
        " excluded.released_at",
        [(key, now) for key in keys],
    )


def release_variants(connection: Connection, fingerprint: str, content: str) -> list[str]:
    """Remove all variants of a chunk that no context cache of their tenant's, and no shared one,
    holds in any form; returns their keys."""
    rows = connection.execute(
        "DELETE FROM variants AS v WHERE fingerprint = :fingerprint AND content = :content AND NOT"
        " EXISTS (SELECT 1 FROM chunks WHERE fingerprint = :fingerprint AND tenant IN (v.tenant,"
        " :shared) AND content = :content) RETURNING key",
        {"fingerprint": fingerprint, "content": content, "shared": SHARED_TENANT},
    ).fetchall()
    return [key for (key,) in rows]


def _insert(
    connection: Connection,
    blobs: TokenBlobs,
    owner: VariantOwner,
    variant: StoredVariant,
    reuse: float,
) -> bool:
    """Record the variant, if some context cache holds its chunk in any form; returns whether it is
    recorded now."""
    connection.execute(
        "INSERT INTO variants SELECT :key, :fingerprint, :tenant, :content, :prefix,"
        " :text, :reuse WHERE EXISTS (SELECT 1 FROM chunks WHERE fingerprint = :fingerprint AND"
        " tenant IN (:tenant, :shared) AND content = :content) ON CONFLICT DO NOTHING",
        asdict(owner)
        | {
            "shared": SHARED_TENANT,
            "key": variant.key,
            "prefix": blobs.pack(variant.prefix, variant_of(variant.key)),
            "text": variant.contextualization.to_json(),
            "reuse": reuse,
        },
    )
    return _exists(connection, variant.key)


def _evict(connection: Connection, *, keep: int) -> dict[str, float]:
    """Evict the least reused variants until ``keep`` are left; returns the evicted keys with their
    f_r."""
    rows = connection.execute(
        "DELETE FROM variants WHERE key IN (SELECT key FROM variants ORDER BY reuse, rowid"
        " LIMIT greatest(0, (SELECT count(*) FROM variants) - :keep)) RETURNING key, reuse",
        {"keep": keep},
    ).fetchall()
    return dict(rows)


def _write_uses(connection: Connection, uses: dict[str, float]) -> None:
    connection.executemany(
        "UPDATE variants SET reuse = greatest(reuse, least(reuse + ?, (SELECT min(reuse) FROM"
        " variants) + ?)) WHERE key = ?",
        [(added, MOST_REUSE, key) for key, added in uses.items()],
    )


def _exists(connection: Connection, key: str) -> bool:
    return connection.execute("SELECT 1 FROM variants WHERE key = ?", (key,)).fetchone() is not None
