"""Keeps answers of the Responses API with their inputs in the catalog, so that requests go on from
them after a restart, and at any server on the catalog."""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Iterator, Sequence

from kvlinker.base.errors import StoreError
from kvlinker.base.types.responses import KeptResponse, Turn
from kvlinker.store.catalog.blobs import (
    TokenBlobs,
    body_of,
    changed_entry,
    input_of,
    item_of,
)
from kvlinker.store.catalog.databases.interface import Connection, Database

MOST_RESPONSES = 10_000
"""The most responses that are kept of a tenant: some hundred tasks of an agent; chosen by hand."""

MOST_BYTES = 256 * 2**20
"""The most bytes of them: at the 10 to 20 kB of a compressed request with an agent's tools, they
are reached after their number; chosen by hand."""

_ROWS_AT_ONCE = 500
"""The rows that one statement takes; chosen by hand."""
_LIVE = "expires_at > :now"


class ResponseLog:
    """The responses of each tenant, by id; another tenant's, an expired and an unknown one are
    alike: absent. Those that were used longest ago make room for new ones.

    Going on from a response is a use of all that it goes on from, so that none of a conversation
    expires before its last one. Raises StoreError as the catalog does. ``now``: Unix seconds.
    """

    def __init__(self, database: Database, blobs: TokenBlobs) -> None:
        self._database = database
        self._blobs = blobs

    def add(
        self,
        response: KeptResponse,
        tenant: str,
        *,
        now: float,
        ttl: float,
        previous: str | None = None,
        used: Sequence[str] = (),
    ) -> None:
        """Keep a response for ``ttl`` seconds from its last use. ``previous`` is the id of the
        response that it goes on from, ``used`` are the ids of responses, and of items of answers,
        that its request refers to; these responses live on."""
        key = secrets.token_hex(12)
        body = self._pack(response.body, body_of(key))
        own_input = self._pack(response.input, input_of(key))
        items = [(secrets.token_hex(12), each, text) for each, text in response.output.items()]
        rows = [
            (item, key, position, tenant, each, self._pack(text, item_of(item)))
            for position, (item, each, text) in enumerate(items)
        ]
        nbytes = len(body) + len(own_input) + sum(len(row[-1]) for row in rows)
        with self._database.transaction() as connection:
            before = self._use(connection, previous, used, tenant, now + ttl)
            _make_room(connection, tenant, nbytes)
            connection.execute(
                "INSERT INTO responses (key, tenant, id, previous, created_at, expires_at, nbytes,"
                " body, input) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (key, tenant, response.id, before, now, now + ttl, nbytes, body, own_input),
            )
            connection.executemany(
                "INSERT INTO response_items (key, response, position, tenant, id, content)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                rows,
            )

    def get(self, response_id: str, tenant: str, now: float) -> KeptResponse | None:
        """Return the tenant's response of this id; None if there is none. It is no use of it."""
        values = {"tenant": tenant, "id": response_id, "now": now}
        rows = self._database.query(
            "SELECT r.key, r.body, r.input, i.key, i.id, i.content FROM responses r"
            " LEFT JOIN response_items i ON i.response = r.key"
            f" WHERE r.tenant = :tenant AND r.id = :id AND r.{_LIVE} ORDER BY i.position",
            values,
        )
        if not rows:
            return None
        key, body, own_input, *_ = rows[0]
        return KeptResponse(
            response_id,
            self._unpack(body, body_of(key)),
            self._unpack(own_input, input_of(key)),
            {
                item_id: self._unpack(content, item_of(item))
                for *_, item, item_id, content in rows
                if item is not None
            },
        )

    def conversation(self, response_id: str, tenant: str, now: float) -> Sequence[Turn] | None:
        """Return the turns up to a response, the first one first; None if one of them is absent, as
        a deleted one is."""
        rows = self._database.query(
            "WITH RECURSIVE turns (key, previous, depth) AS (SELECT key, previous, 0 FROM responses"
            f" WHERE tenant = :tenant AND id = :id AND {_LIVE} UNION ALL SELECT r.key, r.previous,"
            f" t.depth + 1 FROM turns t JOIN responses r ON r.key = t.previous AND r.{_LIVE})"
            " SELECT t.depth, t.previous, r.key, r.input, i.key, i.content FROM turns t"
            " JOIN responses r ON r.key = t.key LEFT JOIN response_items i ON i.response = t.key"
            " ORDER BY t.depth DESC, i.position",
            {"tenant": tenant, "id": response_id, "now": now},
        )
        if not rows or rows[0][1] is not None:  # the first turn that is there had one before it
            return None
        inputs: dict[int, str] = {}
        outputs: dict[int, list[str]] = {}
        for depth, _, key, own_input, item, content in rows:
            if depth not in inputs:
                inputs[depth] = self._unpack(own_input, input_of(key))
                outputs[depth] = []
            if item is not None:
                outputs[depth].append(self._unpack(content, item_of(item)))
        return [Turn(inputs[depth], outputs[depth]) for depth in inputs]

    def items(self, ids: Sequence[str], tenant: str, now: float) -> dict[str, str]:
        """Return those of the items that are there, by id."""
        rows = self._database.query(
            "SELECT i.id, i.key, i.content FROM response_items i JOIN responses r ON r.key ="
            " i.response WHERE i.tenant = :tenant AND i.id IN (SELECT value FROM"
            f" json_each(:ids)) AND r.{_LIVE}",
            {"tenant": tenant, "ids": json.dumps(list(ids)), "now": now},
        )
        return {each: self._unpack(content, item_of(item)) for each, item, content in rows}

    def inputs(self, response_ids: Sequence[str], tenant: str, now: float) -> list[str]:
        """Return the inputs of those of the responses that are there."""
        rows = self._database.query(
            "SELECT key, input FROM responses WHERE tenant = :tenant AND id IN (SELECT value FROM"
            f" json_each(:ids)) AND {_LIVE}",
            {"tenant": tenant, "ids": json.dumps(response_ids), "now": now},
        )
        return [self._unpack(own_input, input_of(key)) for key, own_input in rows]

    def delete(self, response_id: str, tenant: str, now: float) -> bool:
        """Remove a response; returns whether there was one. Those that go on from it are not gone
        on from any more."""
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM responses WHERE tenant = :tenant AND id = :id AND {_LIVE}"
                " RETURNING key",
                {"tenant": tenant, "id": response_id, "now": now},
            ).fetchall()
        return bool(removed)

    def delete_all(self) -> int:
        """Remove the responses of all tenants; returns how many."""
        with self._database.transaction() as connection:
            return len(connection.execute("DELETE FROM responses RETURNING key").fetchall())

    def expire(self, now: float, *, limit: int) -> int:
        """Remove expired responses of all tenants, ``limit`` at most; returns how many."""
        due = "SELECT key FROM responses WHERE expires_at <= :now ORDER BY expires_at LIMIT :limit"
        values = {"now": now, "limit": limit}
        if not self._database.query(due, values):
            return 0  # most of the time, without a transaction
        with self._database.transaction() as connection:
            removed = connection.execute(
                f"DELETE FROM responses WHERE key IN ({due}) RETURNING key", values
            ).fetchall()
        return len(removed)

    def changed(self) -> Iterator[str]:
        """Yield the keys of responses of which a text was changed from outside."""
        last = ""
        while rows := self._database.query(
            "SELECT key, body, input FROM responses WHERE key > :last ORDER BY key LIMIT :limit",
            {"last": last, "limit": _ROWS_AT_ONCE},
        ):
            last = rows[-1][0]
            for key, body, own_input in rows:
                items = self._database.query(
                    "SELECT key, content FROM response_items WHERE response = :key", {"key": key}
                )
                texts = [(body, body_of(key)), (own_input, input_of(key))]
                texts += [(content, item_of(item)) for item, content in items]
                try:
                    for blob, place in texts:
                        self._unpack(blob, place)
                except StoreError:
                    yield key

    def remove(self, keys: Sequence[str]) -> None:
        """Remove responses by their keys."""
        with self._database.transaction() as connection:
            _remove(connection, keys)

    def _use(
        self,
        connection: Connection,
        previous: str | None,
        used: Sequence[str],
        tenant: str,
        expires_at: float,
    ) -> str | None:
        """Extend the lives of a response, of the responses that are ``used`` or have used items,
        and of all that they continue, at least to ``expires_at``; returns the response's key."""
        rows = connection.execute(
            "SELECT key FROM responses WHERE tenant = :tenant AND id = :id",
            {"tenant": tenant, "id": previous},
        ).fetchall()
        key = rows[0][0] if rows else previous  # an id, which is no key, once it was deleted
        connection.execute(
            "WITH RECURSIVE used (key, previous) AS (SELECT key, previous FROM responses WHERE key"
            " = :key OR (tenant = :tenant AND id IN (SELECT value FROM json_each(:used))) OR key IN"
            " (SELECT response FROM response_items WHERE tenant = :tenant AND id IN (SELECT value"
            " FROM json_each(:used))) UNION SELECT r.key, r.previous FROM used u"
            " JOIN responses r ON r.key = u.previous) UPDATE responses SET expires_at ="
            " greatest(expires_at, :expires_at) WHERE key IN (SELECT key FROM used)",
            {
                "key": key,
                "tenant": tenant,
                "used": json.dumps(list(used)),
                "expires_at": expires_at,
            },
        )
        return key

    def _pack(self, text: str, place: str) -> bytes:
        return self._blobs.seal(zlib.compress(text.encode()), place)

    def _unpack(self, blob: bytes, place: str) -> str:
        """Return the text of a blob. Raises StoreError for one that was changed, or moved."""
        packed = self._blobs.open(blob, place)
        try:
            return zlib.decompress(packed).decode()
        except (zlib.error, UnicodeDecodeError) as error:
            raise changed_entry(place, "it is not whole") from error


def _make_room(connection: Connection, tenant: str, nbytes: int) -> None:
    """Make room for a response of ``nbytes`` bytes within the tenant's limits. The least recently
    used responses are evicted, a tenth at once, because finding them reads all."""
    ((count, kept),) = connection.execute(
        "SELECT count(*), CAST(coalesce(sum(nbytes), 0) AS BIGINT) FROM responses WHERE tenant = ?",
        (tenant,),
    ).fetchall()
    if count < MOST_RESPONSES and kept + nbytes <= MOST_BYTES:
        return
    removed = []
    for key, size in connection.execute(
        "SELECT key, nbytes FROM responses WHERE tenant = ? ORDER BY expires_at, created_at",
        (tenant,),
    ):
        if count < 0.9 * MOST_RESPONSES and kept + nbytes <= 0.9 * MOST_BYTES:
            break
        removed.append(key)
        count, kept = count - 1, kept - size
    _remove(connection, removed)


def _remove(connection: Connection, keys: Sequence[str]) -> None:
    connection.executemany("DELETE FROM responses WHERE key = ?", [(key,) for key in keys])
