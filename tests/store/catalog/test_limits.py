"""Quotas and pins in the catalog: counted exactly, never exceeded, whoever comes at the same
time."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.errors import PinLimitError, QuotaExceededError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.base.types.tenants import SHARED_TENANT, Quota, Quotas
from kvlinker.store import Catalog, ContextCache, Limits, TenantUsage, new_context_cache_id
from tests.properties import examples
from tests.store.catalog.conftest import Place
from tests.store.store_chunks import run_threads

NOW = 1000.0


def record(
    number: int, *, tenant: str = "anna", pinned: bool = False, **metadata: str
) -> ContextCache:
    """Number n has n + 1 tokens of 10 bytes."""
    chunk = Chunk(tokens=tuple(range(number + 1)), shared=tenant == SHARED_TENANT)
    return ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint="weights",
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint="weights", tenant=tenant),
        created_at=NOW,
        expires_at=NOW + 10 if number % 2 else None,
        metadata=metadata,
        pinned=pinned,
        kv_bytes=10 * len(chunk),
    )


def quota(**limits: int) -> Limits:
    return Limits(Quotas(Quota(**limits)))


def counted(records: list[ContextCache]) -> TenantUsage:
    chunks = {each.chunk_key: each.tokens for each in records}
    return TenantUsage(len(records), len(chunks), sum(chunks.values()), 10 * sum(chunks.values()))


@examples(40)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["add", "add", "delete", "matching", "expire"]), st.integers(0, 4)
        ),
        max_size=25,
    )
)
def test_usage_is_what_is_there(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    catalog = Catalog(tmp_path_factory.mktemp("catalog") / "catalog.sqlite")
    held: list[ContextCache] = []
    for step, number in steps:
        now = NOW
        if step == "add":
            new = [
                record(number, tenant=tenant, n=str(number)) for tenant in ("anna", "bert", "anna")
            ]
            catalog.add(new)
            held += new
        elif step == "delete" and held:
            gone = held.pop(number % len(held))
            catalog.delete(gone.id, gone.tenant, now)
        elif step == "matching":
            matching = [
                each for each in held if each.tenant == "anna" and each.metadata["n"] == str(number)
            ]
            count, _ = catalog.delete_matching("anna", now, {"n": str(number)}, limit=2)
            assert count == min(2, len(matching))
            gone_ids = {each.id for each in matching} - {
                each.id for each in catalog.list("anna", now, limit=999).items
            }
            held = [each for each in held if each.id not in gone_ids]
        elif step == "expire":
            catalog.expire(NOW + 10)
            held = [each for each in held if each.expires_at is None]
        for tenant in ("anna", "bert"):
            assert catalog.usage(tenant) == counted(
                [each for each in held if each.tenant == tenant]
            )
        assert catalog.chunk_keys().keys() == {each.chunk_key for each in held}
    catalog.close()


def test_a_quota_counts_each_chunk_once_and_names_the_numbers(catalog: Catalog) -> None:
    limits = quota(bytes=30)
    catalog.add([record(0), record(1), record(1)], limits)
    catalog.add([record(1)], limits)
    with pytest.raises(
        QuotaExceededError,
        match=r"30 bytes of KV .* 30 are kept, and this adds 30.*tenant_quota_byt",
    ):
        catalog.add([record(0), record(2)], limits)
    assert catalog.usage("anna") == TenantUsage(caches=4, chunks=2, tokens=3, bytes=30)
    with pytest.raises(
        QuotaExceededError, match=r"of 4 context caches .* 4 are kept, and this adds 1"
    ):
        catalog.add([record(0)], quota(caches=4))
    catalog.add([record(2, tenant="bert")], limits)
    catalog.add([record(9, tenant=SHARED_TENANT)], limits)


RECORDS = st.lists(
    st.builds(
        record,
        st.integers(0, 3),
        tenant=st.sampled_from(["anna", "bert", SHARED_TENANT]),
        pinned=st.booleans(),
    ),
    max_size=4,
)
LIMIT = st.none() | st.integers(0, 80)


@examples(40)
@given(
    kept=RECORDS,
    added=RECORDS,
    quota=st.builds(Quota, LIMIT, st.none() | st.integers(0, 5), LIMIT),
    most_pinned=LIMIT,
)
def test_what_is_checked_before_is_what_counts_afterwards(
    tmp_path_factory: pytest.TempPathFactory,
    kept: list[ContextCache],
    added: list[ContextCache],
    quota: Quota,
    most_pinned: int | None,
) -> None:
    """What would be too much is refused, and nothing else, as counting what was added shows."""
    limits = Limits(Quotas(quota, {SHARED_TENANT: quota}), most_pinned)
    folder = tmp_path_factory.mktemp("catalog")
    with (
        closing(Catalog(folder / "limited.sqlite")) as limited,
        closing(Catalog(folder / "free.sqlite")) as free,
    ):
        for catalog in (limited, free):
            catalog.add([dataclasses.replace(one, id=new_context_cache_id()) for one in kept])
        tenants = {one.tenant for one in added}
        before = {
            tenant: (free.usage(tenant), free.pinned_bytes(tenant))
            for tenant in ("anna", "bert", SHARED_TENANT)
        }
        free.add(added)
        after = {tenant: (free.usage(tenant), free.pinned_bytes(tenant)) for tenant in before}

        def exceeds(limit: int | None, had: int, has: int) -> bool:
            return limit is not None and has > max(limit, had)

        too_much = any(
            exceeds(quota.caches, before[tenant][0].caches, after[tenant][0].caches)
            or exceeds(quota.bytes, before[tenant][0].bytes, after[tenant][0].bytes)
            for tenant in tenants
        )
        pinned, was_pinned = (
            sum(nbytes for _, nbytes in counted.values()) for counted in (after, before)
        )
        too_many_pins = exceeds(most_pinned, was_pinned, pinned) or any(
            exceeds(quota.pinned_bytes, before[tenant][1], after[tenant][1]) for tenant in tenants
        )
        for call in (limited.check_room, limited.add):
            if too_much or too_many_pins:
                with pytest.raises(QuotaExceededError if too_much else PinLimitError):
                    call(added, limits)
            else:
                call(added, limits)
        expected = before if too_much or too_many_pins else after
        assert {
            tenant: (limited.usage(tenant), limited.pinned_bytes(tenant)) for tenant in before
        } == expected


def test_a_quota_that_was_lowered_lets_nothing_in_but_what_costs_nothing(catalog: Catalog) -> None:
    catalog.add([record(5)])
    catalog.add([record(5)], quota(bytes=10))
    with pytest.raises(QuotaExceededError):
        catalog.add([record(4)], quota(bytes=10))


def test_own_quotas_and_that_of_shared_ones(catalog: Catalog) -> None:
    quotas = Quotas(Quota(caches=1), {"bert": Quota(caches=2), SHARED_TENANT: Quota(caches=0)})
    limits = Limits(quotas)
    for tenant, most in (("anna", 1), ("bert", 2), (SHARED_TENANT, 0)):
        for number in range(most):
            catalog.add([record(number, tenant=tenant)], limits)
        with pytest.raises(QuotaExceededError):
            catalog.add([record(5, tenant=tenant)], limits)


def test_a_rehearsal_leaves_nothing(catalog: Catalog) -> None:
    catalog.check_room([record(1, a="b")], quota(caches=1))
    with pytest.raises(QuotaExceededError):
        catalog.check_room([record(1), record(2)], quota(caches=1))
    assert catalog.usage("anna") == TenantUsage()
    assert catalog.chunk_keys() == {}


def test_no_number_of_requests_at_once_exceeds_a_quota(place: Place) -> None:
    """Two processes' catalogs on one file, several threads each."""
    catalogs = [Catalog(place), Catalog(place)]
    refused = []

    def work(catalog: Catalog, start: int) -> None:
        for number in range(start, start + 10):
            try:
                catalog.add([record(number)], quota(caches=25))
            except QuotaExceededError as error:
                refused.append(error)

    run_threads(
        *(lambda c=catalog, s=start: work(c, s) for start in (0, 10) for catalog in catalogs)
    )
    assert catalogs[0].usage("anna").caches == 25
    assert len(refused) == 15
    for catalog in catalogs:
        catalog.close()


def test_pins_are_limited_over_all_tenants_each_chunk_once(catalog: Catalog) -> None:
    limits = Limits(pinned_bytes=50)
    first, second, third = record(1, pinned=True), record(2, tenant="bert"), record(1, pinned=True)
    catalog.add([first, second, third], limits)
    assert catalog.pinned() == {first.chunk_key}
    pinned = catalog.update(second.id, "bert", NOW, pinned=True, limits=limits)
    assert pinned == dataclasses.replace(second, pinned=True)
    with pytest.raises(
        PinLimitError, match=r"At most 50 bytes .*: 50 are, and this would add 10"
    ) as caught:
        catalog.add([record(0, pinned=True)], limits)
    assert (caught.value.status, caught.value.code) == (403, "pin_limit_exceeded")
    late = record(0)
    catalog.add([late], limits)
    with pytest.raises(PinLimitError):
        catalog.update(late.id, "anna", NOW, pinned=True, name="changed too", limits=limits)
    assert catalog.get(late.id, "anna", NOW) == late
    assert catalog.update(second.id, "bert", NOW, pinned=True, limits=limits).pinned
    catalog.update(first.id, "anna", NOW, pinned=False, limits=limits)
    assert catalog.pinned() == {first.chunk_key, second.chunk_key}
    catalog.delete(third.id, "anna", NOW)
    assert catalog.pinned() == {second.chunk_key}
    catalog.update(late.id, "anna", NOW, pinned=True, limits=limits)
    catalog.expire(NOW + 10)
    assert catalog.pinned() == {late.chunk_key, second.chunk_key}


def test_room_is_made_by_what_counts_against_the_limit(catalog: Catalog) -> None:
    """Expired context caches of others, which may be many, are left to the next sweep."""
    own, other = (record(1, tenant=tenant) for tenant in ("anna", "bert"))
    pinned = record(1, tenant="carl", pinned=True)
    catalog.add([own, other, pinned])
    room = catalog.add([record(2)], quota(caches=1), now=NOW + 10)
    assert set(room.released) == {own.chunk_key, pinned.chunk_key}
    assert [catalog.usage(each).caches for each in ("anna", "bert", "carl")] == [1, 1, 0]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_listing_by_metadata(catalog: Catalog, order: Literal["asc", "desc"]) -> None:
    records = [record(4, project="x", page=str(index % 3)) for index in range(10)]
    others = [
        record(4, project="x'; --"),
        record(4, tenant="bert", project="x"),
        record(3, project="x", page="1"),
    ]
    catalog.add([*records, *others])

    def listed(now: float = NOW + 10, **metadata: str) -> list[str]:
        ids: list[str] = []
        has_more = True
        while has_more:
            after = ids[-1] if ids else None
            page, has_more = catalog.list(
                "anna", now, limit=3, after=after, order=order, metadata=metadata
            )
            ids += [each.id for each in page]
        return ids if order == "asc" else ids[::-1]

    assert listed(project="x") == [each.id for each in records]
    assert (
        listed(project="x", page="1")
        == listed(page="1", project="x")
        == [each.id for each in records[1::3]]
    )
    assert listed(NOW, page="1")[-1] == others[-1].id
    assert listed(project="x'; --") == [others[0].id]
    assert listed(project="y") == listed(x="project") == listed(project="x", other="1") == []
    catalog.update(records[0].id, "anna", NOW, metadata={"project": "y"})
    assert listed(project="y") == [records[0].id]
    assert listed(project="x") == [each.id for each in records[1:]]


def test_released_keys_are_told_until_they_are_held_again_or_forgotten(catalog: Catalog) -> None:
    first, second = record(0), record(2)
    catalog.add([first, second])
    catalog.delete(first.id, "anna", NOW)
    catalog.delete_matching("anna", NOW + 1, {}, limit=9)
    assert set(catalog.released(0, NOW + 1)) == {first.chunk_key, second.chunk_key}
    assert catalog.released(NOW, NOW + 1) == {second.chunk_key: NOW + 1}
    assert catalog.released(0, NOW) == {first.chunk_key: NOW}
    catalog.add([record(0)])
    assert catalog.released(0, NOW) == {}
    assert catalog.unheld([first.chunk_key, second.chunk_key]) == (second.chunk_key,)
    catalog.forget_released([], NOW + 1)
    assert catalog.released(0, NOW + 1).keys() == {second.chunk_key}
    catalog.forget_released([second.chunk_key], NOW + 1)
    assert catalog.released(0, NOW + 1) == {}
    (again,) = catalog.list("anna", NOW, limit=9).items
    catalog.delete(again.id, "anna", NOW + 2)
    assert catalog.released(0, NOW + 2) == {first.chunk_key: NOW + 2}
