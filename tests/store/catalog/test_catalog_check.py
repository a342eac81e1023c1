"""A catalog that was harmed from outside says so, and is mended by ``check``."""

from __future__ import annotations

import tracemalloc

import pytest

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.store import Catalog, ContextCache, StoreError, TenantUsage, new_context_cache_id
from kvlinker.store.catalog import check
from tests.store.catalog.conftest import Place
from tests.store.catalog.raw import harm

NOW = 1000.0


def record(number: int, tenant: str = "anna", *, length: int = 2) -> ContextCache:
    chunk = Chunk(tokens=(number, *range(7, 7 + length)))
    return ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint="weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="weights", tenant=tenant),
        created_at=NOW,
        kv_bytes=10,
    )


@pytest.mark.parametrize("tokens", [b"\1\0\0\0\7\0\0\0\7\0\0\0", b"\1\0\0", b""])
def test_changed_token_ids_are_never_answered_with(
    place: Place, catalog: Catalog, tokens: bytes
) -> None:
    changed, other = record(1), record(2)
    catalog.add([changed, other])
    harm(place, "UPDATE chunks SET tokens = ? WHERE key = ?", tokens, changed.chunk_key)
    with pytest.raises(StoreError, match="caches check --repair"):
        catalog.get(changed.id, "anna", NOW)
    assert catalog.get(other.id, "anna", NOW) == other
    for repair, found in ((False, True), (True, True), (False, False)):
        faults = catalog.check(repair=repair)
        assert any(changed.chunk_key in fault for fault in faults) == bool(faults) == found
    assert catalog.list("anna", NOW, limit=10).items == (other,)
    assert catalog.usage("anna") == TenantUsage(caches=1, chunks=1, tokens=3, bytes=10)
    assert catalog.released(float("-inf"), float("inf")).keys() == {changed.chunk_key}


def test_token_ids_are_checked_some_at_a_time(
    place: Place, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large catalog need more memory than there is."""
    monkeypatch.setattr(check, "ROWS_AT_ONCE", 2)
    records = [record(number, length=50_000) for number in range(20)]
    catalog.add(records)
    harm(place, "UPDATE chunks SET tokens = ? WHERE key = ?", b"", records[7].chunk_key)
    tracemalloc.start()
    try:
        assert catalog.check() == (
            f"the token ids of chunk {records[7].chunk_key} are not what they were",
        )
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_wrong_accounts_are_counted_again(place: Place, catalog: Catalog) -> None:
    catalog.add([record(1), record(2), record(1, "bert")])
    harm(place, "UPDATE tenants SET nbytes = nbytes + 1, caches = -3 WHERE name = 'anna'")
    harm(place, "DELETE FROM tenants WHERE name = 'bert'")
    harm(place, "INSERT INTO tenants (name, caches) VALUES ('nobody', 5)")
    assert len(catalog.check()) == 3
    assert len(catalog.check(repair=True)) == 3
    assert catalog.check() == ()
    assert catalog.usage("anna") == TenantUsage(caches=2, chunks=2, tokens=6, bytes=20)
    assert catalog.usage("bert") == TenantUsage(caches=1, chunks=1, tokens=3, bytes=10)
    assert catalog.usage("nobody") == TenantUsage()


def test_chunks_that_nothing_holds_go(place: Place, catalog: Catalog) -> None:
    left = record(1)
    catalog.add([left])
    harm(place, "DELETE FROM context_caches")
    assert len(catalog.check(repair=True)) == 1
    assert catalog.check() == ()
    assert catalog.chunk_keys() == {}
