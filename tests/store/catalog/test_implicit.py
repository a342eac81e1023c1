"""Implicit context caches are found by content, make room for others in order, and damage to one
harms no other."""

from __future__ import annotations

import dataclasses
import tracemalloc
from typing import Any

import pytest

from kvlinker.base.errors import PinLimitError, QuotaExceededError
from kvlinker.base.types.chunks import Chunk, Origin, chunk_key
from kvlinker.base.types.tenants import Quota, Quotas
from kvlinker.store import Catalog, ContextCache, Limits, Room
from kvlinker.store.catalog.databases.interface import Database
from tests.store.catalog.conftest import Place
from tests.store.catalog.raw import harm
from tests.store.catalog.test_catalog_check import record

NOW = 1000.0
TTL = 100.0


def implicit(number: int, *, used: float = NOW, tenant: str = "anna") -> ContextCache:
    """An implicit context cache that was used last at ``used``."""
    return dataclasses.replace(record(number, tenant), implicit_ttl=TTL, expires_at=used + TTL)


def limits(most: int | None = None, **quota: int) -> Limits:
    return Limits(Quotas(Quota(**quota)), implicit_caches=most)


def ids(catalog: Catalog, tenant: str = "anna") -> set[str]:
    return {cache.id for cache in catalog.list(tenant, NOW, limit=100).items}


def test_damage_to_one_chunk_harms_no_other(place: Place, catalog: Catalog) -> None:
    damaged, other = implicit(1), implicit(2)
    catalog.add([damaged, other])
    harm(place, "UPDATE chunks SET tokens = ? WHERE key = ?", b"\1\0\0", damaged.chunk_key)
    found = catalog.implicit.find(
        {each.chunk.content for each in (damaged, other)}, "anna", "weights", NOW
    )
    assert found == {other.chunk.content: [other]}
    assert catalog.implicit.tokens_since(0, "anna", "weights", limit=9) == (
        2,
        (other.chunk.tokens,),
    )
    again = dataclasses.replace(damaged, id="cc_again")
    assert catalog.implicit.enter([again], limits(), now=NOW, kept=()) == [None]
    (entered,) = catalog.implicit.enter([implicit(3)], limits(), now=NOW, kept=())
    assert entered is not None
    assert entered.created


def test_what_stood_before_answers_is_not_unpacked_with_them(catalog: Catalog) -> None:
    """It is a whole conversation each time, and nobody asks for it here."""
    chunk = Chunk((1, 2), tuple(range(100_000)), origin=Origin.ANSWER)
    key = chunk_key(chunk, fingerprint="weights", tenant="anna")
    catalog.add([dataclasses.replace(implicit(1), chunk=chunk, chunk_key=key)])
    tracemalloc.start()
    try:
        found = catalog.implicit.tokens_since(0, "anna", "weights", limit=9)
        assert tracemalloc.get_traced_memory()[1] < 1_500_000, "it takes 400,000 bytes packed"
    finally:
        tracemalloc.stop()
    assert found == (1, ((1, 2),))


def test_those_that_were_used_longest_ago_make_room(catalog: Catalog) -> None:
    named = record(0)
    caches = [implicit(number, used=NOW - number) for number in range(1, 6)]
    foreign = implicit(9, used=NOW - 50, tenant="bert")
    catalog.add([named, *caches, foreign])
    (entered,) = catalog.implicit.enter([implicit(6)], limits(5), now=NOW, kept={caches[4].id})
    assert entered is not None
    assert entered.room == Room(1, (caches[3].chunk_key,))
    assert ids(catalog) == {
        entered.cache.id,
        named.id,
        *(caches[number].id for number in (0, 1, 2, 4)),
    }
    assert ids(catalog, "bert") == {foreign.id}
    added = [record(number) for number in (10, 11, 12)]
    assert catalog.add(added, limits(caches=6)).evicted == 3
    assert ids(catalog) == {named.id, entered.cache.id, caches[0].id, *(each.id for each in added)}


@pytest.mark.parametrize("needed", range(1, 13))
def test_no_more_go_than_have_to(catalog: Catalog, needed: int) -> None:
    caches = [implicit(number, used=NOW + number) for number in range(12)]
    catalog.add(caches)
    added = [record(number) for number in range(20, 20 + needed)]
    room = catalog.add(added, limits(caches=12))
    assert room.evicted == len(room.released) == needed
    assert set(room.released) == {each.chunk_key for each in caches[:needed]}
    assert ids(catalog) == {each.id for each in (*caches[needed:], *added)}


@pytest.mark.parametrize("limit", [limits(caches=4), limits(bytes=35)])
def test_what_can_never_fit_removes_nothing(catalog: Catalog, limit: Limits) -> None:
    caches = [implicit(number) for number in range(3)]
    expired = dataclasses.replace(record(3), expires_at=NOW - 1)
    catalog.add([*caches, expired])
    before = catalog.usage("anna")
    for call in (catalog.check_room, catalog.add):
        with pytest.raises(QuotaExceededError):
            call([record(number) for number in range(10, 15)], limit, now=NOW)
        assert catalog.usage("anna") == before
    catalog.check_room([record(10)], limit, now=NOW)
    assert catalog.usage("anna") == before, "a check removes nothing either"


def test_expired_ones_go_before_implicit_ones(catalog: Catalog) -> None:
    kept, expired = implicit(1), dataclasses.replace(record(2), expires_at=NOW)
    catalog.add([kept, expired])
    assert catalog.add([record(3)], limits(caches=2), now=NOW) == Room(0, (expired.chunk_key,))
    assert kept.id in ids(catalog)


def test_implicit_ones_make_no_room_for_pins(catalog: Catalog) -> None:
    catalog.add([implicit(1)])
    with pytest.raises(PinLimitError):
        catalog.add([dataclasses.replace(record(2), pinned=True)], Limits(pinned_bytes=5))
    assert catalog.usage("anna").caches == 1


def test_a_chunk_that_is_entered_again_is_not_released(catalog: Catalog) -> None:
    catalog.add([implicit(1)])
    assert catalog.add([record(1)], limits(caches=1)) == Room(1, ())


def test_a_tenant_may_have_none(catalog: Catalog) -> None:
    assert catalog.implicit.enter([implicit(1)], limits(0), now=NOW, kept=()) == [None]


def test_many_are_entered_in_one_transaction(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[bool] = []
    database = type(catalog._database)
    transaction = database.transaction

    def noting(self: Database) -> Any:
        begun.append(True)
        return transaction(self)

    monkeypatch.setattr(database, "transaction", noting)
    entered = catalog.implicit.enter(
        [implicit(number) for number in range(5)], limits(3), now=NOW, kept=()
    )
    assert [each is not None for each in entered] == [True, True, True, False, False]
    assert len(begun) == 1
    assert catalog.implicit.total()[0] == 3
