"""Vectors of chunks: nearest first, each tenant's and each embedding model's apart, and gone with
their chunks."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

from kvlinker.store import Catalog
from tests.store.catalog.test_search import NOW, TEXTS, add, record

AXES = np.eye(3, dtype=np.float32)


def nearest(catalog: Catalog, vector: Any, **options: Any) -> tuple[str, ...]:
    values: dict[str, Any] = {
        "embedder": "one",
        "tenant": "anna",
        "fingerprint": "weights",
        "now": NOW,
        "limit": 10,
    }
    return catalog.vectors.nearest(np.asarray(vector, np.float32), **(values | options))


def test_the_nearest_is_first(catalog: Catalog) -> None:
    records = [record(text, metadata={"page": str(i)}) for i, text in enumerate(TEXTS[:3])]
    add(catalog, *records)
    keys = [each.chunk_key for each in records]
    assert catalog.vectors.missing("one", "weights", limit=10).keys() == set(keys)
    assert len(catalog.vectors.missing("one", "weights", limit=2)) == 2
    catalog.vectors.add("one", dict(zip(keys, AXES, strict=True)))
    catalog.vectors.add("one", {keys[0]: AXES[2], "gone": AXES[1]})  # known, and unknown
    assert catalog.vectors.missing("one", "weights", limit=10) == {}
    query = [0.1, 0.9, 0.3]
    assert nearest(catalog, query) == (records[1].id, records[2].id, records[0].id)
    assert nearest(catalog, query, limit=1) == (records[1].id,)
    assert nearest(catalog, query, metadata={"page": "0"}) == (records[0].id,)


@pytest.mark.parametrize("others", [{"tenant": "bert"}, {"fingerprint": "x"}, {"embedder": "two"}])
def test_others_are_kept_apart(catalog: Catalog, others: dict[str, str]) -> None:
    mine = record(TEXTS[0])
    add(catalog, mine)
    catalog.vectors.add("one", {mine.chunk_key: AXES[0]})
    assert nearest(catalog, AXES[0]) == (mine.id,)
    assert nearest(catalog, AXES[0], **others) == ()
    assert len(catalog.vectors.missing("two", "weights", limit=10)) == 1


def test_vectors_go_with_chunks_and_with_the_index(catalog: Catalog) -> None:
    first, second = record(TEXTS[0]), record(TEXTS[1])
    add(catalog, first, second)
    vectors = {first.chunk_key: AXES[0], second.chunk_key: AXES[1]}
    catalog.vectors.add("one", vectors)
    catalog.delete(first.id, "anna", NOW)
    assert nearest(catalog, AXES[0]) == (second.id,)
    catalog.search.clear()
    assert nearest(catalog, AXES[0]) == ()
    assert catalog.vectors.missing("one", "weights", limit=10) == {}, "no text, no vector"


def test_few_of_many_are_found(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlinker.store.catalog.vectors.KEYS_PER_QUERY", 2)
    records = [record(f"{number}", metadata={"even": str(number % 2)}) for number in range(9)]
    add(catalog, *records)
    angles = np.linspace(0, 1, 9, dtype=np.float32)
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    catalog.vectors.add(
        "one", {each.chunk_key: v for each, v in zip(records, vectors, strict=True)}
    )
    expected = tuple(each.id for each in records)
    assert nearest(catalog, [1, 0]) == expected
    assert nearest(catalog, [1, 0], limit=5) == expected[:5]
    assert nearest(catalog, [1, 0], metadata={"even": "0"}) == expected[::2]


def test_vectors_are_compared_some_at_a_time(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a large corpus take much memory, and long to read."""
    monkeypatch.setattr("kvlinker.store.catalog.vectors.VECTORS_PER_QUERY", 3)
    records = [record(f"{number}") for number in range(20)]
    add(catalog, *records)
    vectors = np.zeros((20, 20_000), np.float32)
    vectors[:, 0] = np.linspace(1, 0, 20)
    catalog.vectors.add(
        "one", {each.chunk_key: v for each, v in zip(records, vectors, strict=True)}
    )
    tracemalloc.start()
    try:
        found = nearest(catalog, vectors[0], limit=20)
        assert tracemalloc.get_traced_memory()[1] < vectors.nbytes
    finally:
        tracemalloc.stop()
    assert found == tuple(each.id for each in records)
