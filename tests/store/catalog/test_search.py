"""The search index: which chunks a query finds, for whom, and that deleted texts are gone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.base.types.texts import SearchHit
from kvlinker.store import Catalog, ContextCache, new_context_cache_id
from kvlinker.store.catalog.search import MOST_WORDS
from tests.store.catalog.conftest import Place
from tests.store.catalog.raw import harm

NOW = 1000.0
TEXTS = (
    "Mira Holt lives in Varna. She works as a baker.",
    "Tom Reyes lives in Oslo. He works as a pilot.",
    "The library in Oslo opens at nine. Oslo is a city.",
)


def record(
    text: str, *, tenant: str = "anna", fingerprint: str = "weights", **fields: object
) -> ContextCache:
    """A context cache of a chunk whose tokens are the text's bytes."""
    chunk = Chunk(tokens=tuple(text.encode()))
    made = ContextCache(
        id=new_context_cache_id(),
        tenant=tenant,
        model="tiny",
        fingerprint=fingerprint,
        chunk=chunk,
        chunk_key=chunk_key(chunk, fingerprint=fingerprint, tenant=tenant),
        created_at=NOW,
    )
    return dataclasses.replace(made, **fields)  # type: ignore[arg-type]


def add(catalog: Catalog, *records: ContextCache) -> None:
    catalog.add(records)
    catalog.search.add({each.chunk_key: bytes(each.chunk.tokens).decode() for each in records})


def search(
    catalog: Catalog,
    query: str,
    *,
    tenant: str = "anna",
    limit: int = 10,
    now: float = NOW,
    fingerprint: str = "weights",
    **metadata: str,
) -> tuple[SearchHit, ...]:
    return catalog.search.search(
        query, tenant=tenant, fingerprint=fingerprint, now=now, limit=limit, metadata=metadata
    )


def texts(hits: tuple[SearchHit, ...]) -> list[str]:
    return [hit.text for hit in hits]


def test_best_match_is_first(catalog: Catalog, place: Place) -> None:
    records = [record(text, metadata={"page": str(page)}) for page, text in enumerate(TEXTS)]
    add(catalog, *records)
    hits = search(catalog, "Where does Tom Reyes live?")
    assert hits[0] == SearchHit(
        records[1].id, hits[0].score, TEXTS[1], len(TEXTS[1]), {"page": "1"}
    )
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    assert hits[0].score > hits[-1].score > 0
    assert texts(search(catalog, "oslo", limit=1)) == [TEXTS[2]]
    assert texts(search(catalog, "BAKERS")) == [TEXTS[0]], "case and endings do not count"
    if isinstance(place, Path):
        assert texts(search(catalog, "bàker")) == [TEXTS[0]], "nor do accents in SQLite"
    assert search(catalog, "zebra") == ()


QUERIES = [
    '"Tom"',
    'Tom"',
    '"Tom NEAR(pilot',
    "NEAR(Tom pilot, 1)",
    "Tom AND pilot",
    "NOT Tom",
    "Tom*",
    "text:Tom",
    "^Tom",
    "-Tom + (pilot)",
    "Tom; DROP TABLE texts_1; --",
    "{Tom}: \0'",
    "Tom " + " ".join(f"word{i}" for i in range(2000)),
]


def test_nothing_in_a_query_is_syntax(catalog: Catalog, subtests: pytest.Subtests) -> None:
    add(catalog, *map(record, TEXTS))
    for query in QUERIES:
        with subtests.test(query=query):
            assert texts(search(catalog, query))[0] == TEXTS[1]


def test_the_first_words_of_a_long_query_count(catalog: Catalog) -> None:
    add(catalog, *map(record, TEXTS))
    others = " ".join(f"word{number}" for number in range(MOST_WORDS))
    assert texts(search(catalog, f"Tom {others}"))[0] == TEXTS[1]
    assert search(catalog, f"{others} Tom") == ()


def test_a_query_of_too_many_bytes_is_refused(catalog: Catalog) -> None:
    add(catalog, *map(record, TEXTS))
    long = [f"word{number}" + "é" * 990 for number in range(MOST_WORDS)]
    assert texts(search(catalog, " ".join(["Tom", *long[:500]])))[0] == TEXTS[1]
    with pytest.raises(InvalidRequestError, match="at most 1,000,000") as caught:
        search(catalog, " ".join(long))
    assert caught.value.param == "query"


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # no example changes the catalog
@given(query=st.text(min_size=1, max_size=30))
def test_any_query_is_answered_or_refused(catalog: Catalog, query: str) -> None:
    if not catalog.tenants():
        add(catalog, *map(record, TEXTS))
    if any(character.isalnum() or character == "_" for character in query):
        search(catalog, query)
    else:
        with pytest.raises(InvalidRequestError):
            search(catalog, query)


def test_query_without_words(catalog: Catalog, subtests: pytest.Subtests) -> None:
    for query in ("", "?", ' "*" ', "\0"):
        with subtests.test(query=query):
            with pytest.raises(InvalidRequestError, match="no word") as caught:
                search(catalog, query)
            assert caught.value.param == "query"


def test_other_tenants_change_nothing(catalog: Catalog) -> None:
    """Neither what is found nor the scores, which depend on how many texts have a word."""
    add(catalog, *map(record, TEXTS))
    before = search(catalog, "Tom in Oslo")
    for number in range(20):
        add(catalog, record(f"{number} Tom in Oslo", tenant="bert"))
    assert search(catalog, "Tom in Oslo") == before
    assert len(search(catalog, "Tom", tenant="bert")) == 10
    assert search(catalog, "Tom", tenant="carl") == ()


def test_only_live_usable_and_matching(catalog: Catalog) -> None:
    add(
        catalog,
        record("cat one", expires_at=NOW + 1, metadata={"a": "1"}),
        record("cat two", metadata={"a": "1", "b": "2"}),
        record("cat three", fingerprint="other weights"),
    )
    assert sorted(texts(search(catalog, "cat"))) == ["cat one", "cat two"]
    assert texts(search(catalog, "cat", now=NOW + 1)) == ["cat two"]
    assert texts(search(catalog, "cat", a="1", b="2")) == ["cat two"]
    assert search(catalog, "cat", a="2") == ()
    assert texts(search(catalog, "cat", fingerprint="other weights")) == ["cat three"]


def test_same_text_is_found_once(catalog: Catalog) -> None:
    """As the newest context cache that has the metadata."""
    old, new = record("cat", metadata={"a": "old"}), record("cat", metadata={"a": "new"})
    add(catalog, old)
    add(catalog, new)
    assert [hit.id for hit in search(catalog, "cat")] == [new.id]
    assert [hit.id for hit in search(catalog, "cat", a="old")] == [old.id]
    catalog.delete(new.id, "anna", NOW)
    assert [hit.id for hit in search(catalog, "cat")] == [old.id]


@pytest.mark.parametrize("way", ["delete", "expire", "delete_matching"])
def test_text_goes_with_its_chunk(place: Place, catalog: Catalog, way: str) -> None:
    add(
        catalog,
        record("cat one", expires_at=NOW + 1, metadata={"a": "1"}, id="cc_1"),
        record("cat two"),
    )
    if way == "delete":
        catalog.delete("cc_1", "anna", NOW)
    elif way == "expire":
        catalog.expire(NOW + 1)
    else:
        catalog.delete_matching("anna", NOW, {"a": "1"}, limit=9)
    assert texts(search(catalog, "cat one")) == ["cat two"]
    table = "texts_1" if isinstance(place, Path) else "texts"
    assert harm(place, f"SELECT text FROM {table}") == [("cat two",)]


def test_what_is_not_indexed_yet_is_told(catalog: Catalog) -> None:
    one, two, other = (
        record("cat one"),
        record("cat two", tenant="bert"),
        record("cat", fingerprint="other weights"),
    )
    catalog.add([one, two, other])
    assert catalog.without_text("weights", limit=10) == {
        r.chunk_key: r.chunk.tokens for r in (one, two)
    }
    assert len(catalog.without_text("weights", limit=1)) == 1
    catalog.search.add({one.chunk_key: "cat one", "0" * 64: "a chunk that is gone"})
    catalog.search.add({one.chunk_key: "cat again"})
    assert texts(search(catalog, "cat")) == ["cat one"], "a text is indexed once"
    assert catalog.without_text("weights", limit=10).keys() == {two.chunk_key}
    catalog.search.clear()
    assert search(catalog, "cat") == ()
    assert len(catalog.without_text("weights", limit=10)) == 2


def test_check_repairs_the_index(place: Place, catalog: Catalog) -> None:
    add(catalog, *map(record, TEXTS))
    assert catalog.check() == ()
    harm(place, "DELETE FROM context_caches WHERE number = 1")
    assert catalog.check(repair=True)
    assert catalog.check() == ()
    assert sorted(texts(search(catalog, "Oslo"))) == sorted(TEXTS[1:])
