"""A catalog that an older kvlinker wrote becomes one of this version, with nothing lost."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store import Catalog, TenantUsage
from kvlinker.store.catalog.encryption import TokenBlobs
from kvlinker.store.catalog.schema import _FIFTH, _FIRST, _FOURTH, _SECOND, _THIRD, SCHEMA_VERSION, index_metadata

NOW = 1000.0
KEYS = {
    "anna": chunk_key(Chunk((1, 2, 3), (9,)), fingerprint="weights", tenant="anna"),
    "bert": chunk_key(Chunk((4, 5), (9,)), fingerprint="weights", tenant="bert"),
}


def older(path: Path, version: int) -> None:
    """Three context caches of two tenants, two of which hold the same chunk, as the older version recorded them."""
    with sqlite3.connect(path) as raw:
        for step in (_FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH)[:version]:
            for statement in step:
                raw.execute(statement)
        for tenant, tokens in (("anna", (1, 2, 3)), ("bert", (4, 5))):
            row = {
                "key": KEYS[tenant],
                "fingerprint": "weights",
                "tenant": tenant,
                "tokens": TokenBlobs().pack(tokens, ""),
                "prefix": TokenBlobs().pack((9,), ""),
                "created_at": NOW,
            }
            if version > 1:
                row["content"] = Chunk(tokens).content
            if version > 2:
                row["length"] = len(tokens)
            raw.execute(
                f"INSERT INTO chunks ({', '.join(row)}) VALUES ({', '.join('?' * len(row))})", tuple(row.values())
            )
        for cache_id, tenant, metadata in (
            ("cc_1", "anna", {"färbe": "grün\0gelb", "a": "1"}),
            ("cc_2", "anna", {}),
            ("cc_3", "bert", {"a": "1"}),
        ):
            number = raw.execute(
                "INSERT INTO context_caches (id, tenant, model, name, metadata, created_at, expires_at, chunk_key)"
                " VALUES (?, ?, 'tiny', NULL, ?, ?, NULL, ?)",
                (cache_id, tenant, json.dumps(metadata), NOW, KEYS[tenant]),
            ).lastrowid
            if version > 2:
                assert number is not None
                index_metadata(raw, number, metadata)
        raw.execute(f"PRAGMA user_version = {version}")
    raw.close()


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_upgrade(tmp_path: Path, version: int) -> None:
    path = tmp_path / "catalog.sqlite"
    older(path, version)
    for _ in range(2):  # the second time it is of this version already
        catalog = Catalog(path)
        first = catalog.get("cc_1", "anna", NOW)
        assert first is not None
        assert (first.chunk, first.pinned, first.kv_bytes) == (Chunk((1, 2, 3), (9,)), False, 0)
        assert first.implicit_ttl is None
        assert catalog.usage("anna") == TenantUsage(caches=2, chunks=1, tokens=3, bytes=0)
        assert catalog.usage("bert") == TenantUsage(caches=1, chunks=1, tokens=2, bytes=0)
        found = catalog.list("anna", NOW, limit=9, metadata={"färbe": "grün\0gelb", "a": "1"}).items
        assert [each.id for each in found] == ["cc_1"]
        catalog.close()
    catalog = Catalog(path)
    catalog.set_sizes("other weights", 10)
    catalog.set_sizes("weights", 10)
    catalog.set_sizes("weights", 77)
    assert catalog.without_text("weights", limit=9) == {KEYS["anna"]: (1, 2, 3), KEYS["bert"]: (4, 5)}
    assert catalog.usage("anna") == TenantUsage(caches=2, chunks=1, tokens=3, bytes=30)
    assert catalog.delete("cc_3", "bert", NOW) == (KEYS["bert"],)
    assert catalog.usage("bert") == TenantUsage()
    assert catalog.list("bert", NOW, limit=9, after="cc_3").items == ()
    catalog.close()
    with sqlite3.connect(path) as raw:
        assert raw.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION,)
    raw.close()
