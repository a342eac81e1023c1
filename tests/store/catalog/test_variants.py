"""Variants in the catalog: the least reused ones make room, and age."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.store import Catalog
from kvlinker.store.catalog.variants import StoredVariant, VariantIndex, VariantOwner
from kvlinker.store.eviction import MOST_REUSE
from tests.store.catalog.test_catalog import record

HELD = record(1)
OWNER = VariantOwner(HELD.fingerprint, HELD.tenant, HELD.chunk.content)


@pytest.fixture
def variants(catalog: Catalog) -> VariantIndex:
    catalog.add([HELD])
    return catalog.variants


def add(variants: VariantIndex, *keys: str, limit: int) -> tuple[str, ...]:
    """Returns what had to go."""
    made = [StoredVariant(key, (1, 2), Contextualization(3, intra=0.5)) for key in keys]
    return variants.add([(OWNER, variant) for variant in made], limit=limit)


def kept(variants: VariantIndex) -> list[str]:
    """The most reused first."""
    return [variant.key for variant in variants.find(OWNER)]


def test_the_less_is_computed_again_the_longer_a_variant_stays(variants: VariantIndex) -> None:
    assert add(variants, "a", "b", "c", limit=3) == ()
    for key, recomputed in (("a", 0.9), ("b", 0.1), ("c", 0.5)):
        variants.note_use(key, recomputed)
    assert add(variants, "d", limit=3) == ("a",)
    assert kept(variants) == ["b", "d", "c"] or kept(variants) == ["b", "c", "d"]


def test_newcomers_begin_above_what_made_room_for_them(variants: VariantIndex) -> None:
    add(variants, "old", "older", limit=2)
    for key in ("old", "older"):
        for _ in range(3):
            variants.note_use(key, 0.5)
    assert add(variants, "new", limit=2) == ("old",)
    assert add(variants, "newer", limit=2) == ("older",)


def test_an_old_favourite_gives_way_after_a_while(variants: VariantIndex) -> None:
    add(variants, "favourite", "b", limit=2)
    for _ in range(100):
        variants.note_use("favourite", 0.0)
    gone: list[str] = []
    while "favourite" not in gone:
        gone += add(variants, f"new{len(gone)}", limit=2)
        assert len(gone) <= MOST_REUSE + 1
    assert len(gone) > MOST_REUSE / 2


def test_variants_of_what_nobody_holds_may_not_stay(variants: VariantIndex) -> None:
    stranger = replace(OWNER, tenant="bert")
    made = StoredVariant("a", (1, 2), Contextualization(3, intra=0.5))
    assert variants.add([(stranger, made)], limit=3) == ("a",)
