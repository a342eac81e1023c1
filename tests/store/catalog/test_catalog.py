"""The catalog: owners, expiry, pages, and which chunks are released when."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import ContextCacheNotFoundError
from kvlinker.base.types.chunks import END_OF_TIME, Chunk, chunk_key
from kvlinker.store import Catalog, ContextCache, StoreError, new_context_cache_id
from kvlinker.store.catalog.catalog import POSITION_SECONDS
from tests.properties import examples
from tests.store.catalog.conftest import Place
from tests.store.store_chunks import run_threads

NOW = 1000.0


def record(
    number: int = 0,
    *,
    tenant: str = "anna",
    created_at: float = NOW,
    expires_at: float | None = None,
) -> ContextCache:
    chunk = Chunk(tokens=(number, 2**32 - 1, 0), prefix=(1,))
    return ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint="sha256:weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="sha256:weights", tenant=tenant),
        created_at=created_at,
        expires_at=expires_at,
        name=f"number {number}",
        metadata={"source": "färöisch.md", "page": str(number)},
    )


def count(catalog: Catalog, tenant: str, now: float) -> int:
    return len(catalog.list(tenant, now, limit=1000).items)


def test_what_is_added_is_found_in_every_field_also_after_a_restart(
    place: Place, catalog: Catalog
) -> None:
    plain = dataclasses.replace(record(1), name=None, metadata={})
    full = record(2, expires_at=NOW + 1)
    catalog.add([plain, full])
    catalog.close()
    catalog.close()
    reopened = Catalog(place)
    for added in (plain, full):
        found = reopened.get(added.id, "anna", NOW)
        assert found == added
        assert found is not None
        assert found.tokens == 3
    reopened.close()


def test_a_context_cache_cannot_be_changed_by_its_reader(catalog: Catalog) -> None:
    source = {"page": "1"}
    added = dataclasses.replace(record(), metadata=source)
    source["page"] = "2"
    assert added.metadata == {"page": "1"}
    with pytest.raises(TypeError):
        added.metadata["page"] = "3"  # type: ignore[index]
    catalog.add([added])
    assert {added, catalog.get(added.id, "anna", NOW)} == {added}


def test_ids_are_of_the_promised_form_and_differ() -> None:
    ids = {new_context_cache_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(
        len(each) == 27 and each.startswith("cc_") and int(each[3:], 16) >= 0 for each in ids
    )


def test_another_tenants_context_cache_is_as_if_absent(catalog: Catalog) -> None:
    hers = record(tenant="anna")
    catalog.add([hers])
    assert catalog.get(hers.id, "bert", NOW) is None
    assert catalog.get_many([hers.id], "bert", NOW) == {}
    assert catalog.list("bert", NOW, limit=10).items == ()
    assert count(catalog, "bert", NOW) == 0
    with pytest.raises(ContextCacheNotFoundError):
        catalog.list("bert", NOW, limit=10, after=hers.id)
    with pytest.raises(ContextCacheNotFoundError):
        catalog.update(hers.id, "bert", NOW, name="mine now")
    with pytest.raises(ContextCacheNotFoundError):
        catalog.delete(hers.id, "bert", NOW)
    assert catalog.get(hers.id, "anna", NOW) == hers


@pytest.mark.parametrize("expires_at", [1e300, float("inf")])
def test_a_time_that_no_calendar_has_is_the_last_one(catalog: Catalog, expires_at: float) -> None:
    catalog.add([record(1, expires_at=expires_at)])
    (found,) = catalog.list("anna", NOW, limit=10).items
    assert found.expires_at == END_OF_TIME


def test_many_expire_in_parts(catalog: Catalog) -> None:
    """Others wait for the end of each part, not of all."""
    expiring = [record(number, expires_at=NOW - number) for number in range(5)]
    catalog.add([*expiring, record(9)])
    keys = [each.chunk_key for each in reversed(expiring)]
    parts = [catalog.expire(NOW, limit=2) for _ in range(4)]
    assert [count for count, _ in parts] == [2, 2, 1, 0]
    assert [set(released) for _, released in parts] == [
        set(keys[:2]), set(keys[2:4]), set(keys[4:]), set()
    ]  # fmt: skip
    assert count(catalog, "anna", NOW) == 1


def test_at_its_expiry_a_context_cache_is_as_if_absent(catalog: Catalog) -> None:
    expiring = record(1, expires_at=NOW)
    catalog.add([expiring, record(2)])
    just_before = NOW - 0.001
    assert catalog.get(expiring.id, "anna", just_before) == expiring
    assert count(catalog, "anna", just_before) == 2
    assert catalog.expire(just_before) == (0, ())
    assert catalog.get(expiring.id, "anna", NOW) is None
    assert catalog.get_many([expiring.id], "anna", NOW) == {}
    assert expiring not in catalog.list("anna", NOW, limit=10).items
    assert count(catalog, "anna", NOW) == 1
    with pytest.raises(ContextCacheNotFoundError):
        catalog.update(expiring.id, "anna", NOW, expires_at=None)
    with pytest.raises(ContextCacheNotFoundError):
        catalog.delete(expiring.id, "anna", NOW)
    assert catalog.expire(NOW) == (1, (expiring.chunk_key,))
    assert catalog.expire(NOW) == (0, ())


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("way", ["delete", "expiry", "sweep", "metadata"])
def test_listings_go_on_behind_what_was_removed(
    catalog: Catalog, order: Literal["asc", "desc"], way: str
) -> None:
    """Those of one creation, too, which differ in their number only."""
    records = [record(n, expires_at=NOW + 5 if n == 2 else None) for n in range(5)]
    catalog.add(records)
    in_order = records if order == "asc" else records[::-1]
    cursor = catalog.list("anna", NOW, limit=3, order=order).items[-1]
    assert cursor == records[2]
    now = NOW + 5 if way in ("expiry", "sweep") else NOW
    if way == "delete":
        catalog.delete(cursor.id, "anna", now)
    elif way == "sweep":
        catalog.expire(now)
    elif way == "metadata":
        catalog.delete_matching("anna", now, {"page": "2"}, limit=9)
    assert catalog.get(cursor.id, "anna", now) is None
    assert (
        list(catalog.list("anna", now, limit=9, order=order, after=cursor.id).items) == in_order[3:]
    )
    with pytest.raises(ContextCacheNotFoundError):
        catalog.list("bert", now, limit=9, after=cursor.id)


def test_removed_positions_are_forgotten(catalog: Catalog) -> None:
    removed = record(1)
    catalog.add([removed])
    catalog.delete(removed.id, "anna", NOW)
    catalog.expire(time.time() + POSITION_SECONDS - 10)
    assert catalog.list("anna", NOW, limit=9, after=removed.id).items == ()
    catalog.expire(time.time() + POSITION_SECONDS + 10)
    with pytest.raises(ContextCacheNotFoundError):
        catalog.list("anna", NOW, limit=9, after=removed.id)


def test_a_chunk_is_released_with_its_last_holder(catalog: Catalog) -> None:
    first, second, other = record(1), record(1, expires_at=NOW + 5), record(2)
    assert first.chunk_key == second.chunk_key
    catalog.add([first, other])
    catalog.add([second])
    assert catalog.chunk_keys() == {each.chunk_key: "sha256:weights" for each in (first, other)}
    assert catalog.delete(first.id, "anna", NOW) == ()
    assert catalog.get(second.id, "anna", NOW) == second
    assert catalog.expire(NOW + 5) == (1, (first.chunk_key,))
    assert catalog.chunk_keys() == {other.chunk_key: "sha256:weights"}
    assert catalog.delete(other.id, "anna", NOW) == (other.chunk_key,)
    with pytest.raises(ContextCacheNotFoundError, match=other.id):
        catalog.delete(other.id, "anna", NOW)


def test_a_chunk_has_scores_where_somebody_named_it(catalog: Catalog) -> None:
    found = dataclasses.replace(record(1, expires_at=NOW + 300), implicit_ttl=300.0)
    named = record(1)
    assert found.chunk_key == named.chunk_key
    assert catalog.chunk(found.chunk_key) is None
    catalog.add([found])
    known = catalog.chunk(found.chunk_key)
    assert known is not None
    assert not known[0].scored
    catalog.add([named])
    known = catalog.chunk(found.chunk_key)
    assert known is not None
    assert known[0].scored


def test_add_is_all_or_nothing(catalog: Catalog) -> None:
    first, second = record(1), record(2)
    with pytest.raises(StoreError, match=r"UNIQUE|unique"):
        catalog.add([first, second, first])
    assert count(catalog, "anna", NOW) == 0
    assert catalog.chunk_keys() == {}
    catalog.add([])
    catalog.add([first])
    assert count(catalog, "anna", NOW) == 1


def test_get_many_finds_what_exists_however_many_are_asked_for(catalog: Catalog) -> None:
    records = [record(number) for number in range(1200)]
    catalog.add(records)
    ids = [each.id for each in records]
    found = catalog.get_many([*ids, "cc_unknown", *ids], "anna", NOW)
    assert found == {each.id: each for each in records}
    assert catalog.get_many([], "anna", NOW) == {}
    assert catalog.get("cc_unknown", "anna", NOW) is None


def test_update_changes_what_is_given_and_nothing_else(catalog: Catalog) -> None:
    before, bystander = record(1, expires_at=NOW + 1), record(2)
    catalog.add([before, bystander])
    assert catalog.update(before.id, "anna", NOW) == before
    renamed = catalog.update(before.id, "anna", NOW, name="new", metadata={"a": "b"})
    assert renamed == dataclasses.replace(before, name="new", metadata={"a": "b"})
    forever = catalog.update(before.id, "anna", NOW, expires_at=None, name=None)
    assert forever == dataclasses.replace(renamed, expires_at=None, name=None)
    assert catalog.get(before.id, "anna", NOW + 100) == forever
    assert catalog.update(before.id, "anna", NOW, expires_at=NOW).expires_at == NOW
    assert catalog.get(before.id, "anna", NOW) is None
    assert catalog.get(bystander.id, "anna", NOW) == bystander


Order = Literal["asc", "desc"]


def all_pages(catalog: Catalog, order: Order, limit: int) -> list[ContextCache]:
    """Everything listed page by page, with others added at both ends after each of the first
    pages."""
    items: list[ContextCache] = []
    others = 5
    while True:
        page = catalog.list(
            "anna", NOW, limit=limit, after=items[-1].id if items else None, order=order
        )
        items += page.items
        if not page.has_more:
            return items
        assert len(page.items) == limit
        if others:
            others -= 1
            catalog.add([record(50, created_at=0.0), record(51, created_at=9.0)])


@examples(25)
@given(
    times=st.lists(st.integers(0, 3), max_size=12),
    limit=st.integers(1, 5),
    order=st.sampled_from(["asc", "desc"]),
)
def test_pages_neither_repeat_nor_skip_while_others_are_added(
    tmp_path_factory: pytest.TempPathFactory, times: list[int], limit: int, order: Order
) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("catalog") / "catalog.sqlite3")
    records = [record(number, created_at=float(time)) for number, time in enumerate(times)]
    catalog.add(records)
    catalog.add([record(99, tenant="bert"), record(98, expires_at=1.0)])
    listed = all_pages(catalog, order, limit)
    catalog.close()
    expected = sorted(
        records, key=lambda each: each.created_at
    )  # stable: equal times stay in order of creation
    if order == "desc":
        expected.reverse()
    known = set(records)
    assert [each for each in listed if each in known] == expected
    assert len({each.id for each in listed}) == len(listed)


@pytest.mark.whole
@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("metadata", [{}, {"source": "färöisch.md"}], ids=["all", "by metadata"])
def test_ten_thousand_are_paged_through_while_others_come_and_go(
    place: Place, catalog: Catalog, order: Literal["asc", "desc"], metadata: dict[str, str]
) -> None:
    """In SQLite; a thousand in PostgreSQL, whose pages come by the same statements."""
    many = 10_000 if isinstance(place, Path) else 1_000
    throughout = [record(number, created_at=NOW + number % 7) for number in range(many)]
    catalog.add(throughout)
    passing = [record(number, created_at=NOW + number) for number in range(8)]
    catalog.add(passing)
    seen: list[str] = []
    after: str | None = None
    for number in range(1000):
        page = catalog.list("anna", NOW, limit=100, after=after, order=order, metadata=metadata)
        seen += [cache.id for cache in page.items]
        if not page.has_more:
            break
        after = seen[-1]
        catalog.delete(passing.pop(0).id, "anna", NOW)
        passing.append(record(number, created_at=NOW + number % 11))
        catalog.add(passing[-1:])
    assert len(seen) == len(set(seen))
    assert set(seen) >= {cache.id for cache in throughout}


def test_has_more_is_exact(catalog: Catalog) -> None:
    catalog.add([record(number) for number in range(4)])
    assert not catalog.list("anna", NOW, limit=4).has_more
    assert catalog.list("anna", NOW, limit=3).has_more
    with pytest.raises(ContextCacheNotFoundError, match="cc_unknown"):
        catalog.list("anna", NOW, limit=4, after="cc_unknown")


def test_two_catalogs_in_one_place(place: Place) -> None:
    opened: list[Catalog] = []
    run_threads(*[lambda: opened.append(Catalog(place))] * 4)
    first, second = opened[:2]
    mine, theirs = (
        [record(number) for number in range(40)],
        [record(number) for number in range(40)],
    )

    def add_all(catalog: Catalog, records: list[ContextCache]) -> None:
        for each in records:
            catalog.add([each])

    run_threads(lambda: add_all(first, mine), lambda: add_all(second, theirs))
    assert count(first, "anna", NOW) == count(second, "anna", NOW) == 80
    assert all(first.delete(each.id, "anna", NOW) == () for each in theirs)
    released = [key for each in mine for key in second.delete(each.id, "anna", NOW)]
    assert released == [each.chunk_key for each in mine]
    for catalog in opened:
        catalog.close()


def test_tenants_are_those_with_context_caches(catalog: Catalog) -> None:
    assert catalog.tenants() == ()
    records = [record(tenant="cleo"), record(tenant="bert"), record(1, tenant="cleo")]
    catalog.add(records)
    assert catalog.tenants() == ("bert", "cleo")
    catalog.delete(records[1].id, "bert", NOW)
    assert catalog.tenants() == ("cleo",)


def test_threads_share_one_catalog(catalog: Catalog) -> None:
    def work(start: int) -> None:
        for number in range(start, start + 20):
            added = record(number)
            catalog.add([added])
            assert catalog.get(added.id, "anna", NOW) == added
            assert catalog.delete(added.id, "anna", NOW) == (added.chunk_key,)

    run_threads(*(lambda start=start: work(start) for start in (0, 100, 200)))
    assert catalog.chunk_keys() == {}


def test_a_thread_never_sees_another_ones_half_done_change(catalog: Catalog) -> None:
    records = [record(number) for number in range(200)]
    counts = set()

    def add_in_vain() -> None:
        for _ in range(15):
            with pytest.raises(StoreError):
                catalog.add([*records, records[0]])
        counts.add(-1)

    def read() -> None:
        while -1 not in counts:
            counts.add(count(catalog, "anna", NOW))

    run_threads(add_in_vain, read)
    assert counts == {0, -1}
