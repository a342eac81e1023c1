"""What only a catalog in PostgreSQL can meet: servers that start at once, restarts, outages, other
programs' databases; and its own search."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from unittest import mock

import psycopg
import pytest

from kvlinker.base.errors import (
    CatalogUnavailableError,
    ContextCacheNotFoundError,
    InvalidRequestError,
    QuotaExceededError,
    StoreError,
)
from kvlinker.base.types.tenants import Quota, Quotas
from kvlinker.store import Catalog, Limits
from kvlinker.store.catalog.databases import postgresql
from kvlinker.store.catalog.databases.postgresql_tables import (
    POSTGRES_VERSION,
    SCHEMA,
    SEARCHED_CHARACTERS,
    translated,
)
from kvlinker.store.format.encryption import Cipher
from tests.postgres_server import PostgresServer
from tests.store.catalog.raw import harm
from tests.store.catalog.test_catalog_check import NOW, record
from tests.store.catalog.test_search import add, search
from tests.store.catalog.test_search import record as text_record
from tests.store.store_chunks import run_threads
from tests.waiting import wait_until


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.new_database()


@pytest.fixture
def catalog(url: str) -> Iterator[Catalog]:
    with closing(Catalog(url)) as catalog:
        yield catalog


@pytest.fixture
def frail_postgres() -> Iterator[PostgresServer]:
    server = PostgresServer()
    yield server
    server.remove()


def test_servers_that_start_at_once_make_one_catalog(url: str) -> None:
    opened: list[Catalog] = []
    run_threads(*[lambda: opened.append(Catalog(url))] * 8)
    assert len(opened) == 8
    kept = record(1)
    opened[0].add([kept])
    assert all(each.get(kept.id, "anna", NOW) == kept for each in opened)
    for each in opened:
        each.close()


def test_eight_writers_pass_no_quota_and_all_sums_are_equal(url: str) -> None:
    """Adding, deleting, expiring and joining at once: nothing waits for two locks."""
    limits = Limits(Quotas(Quota(caches=12, bytes=100)))
    catalogs = [Catalog(url) for _ in range(8)]
    refused = threading.Event()

    def write(catalog: Catalog, first: int) -> None:
        for number in range(first, first + 12):
            expiring = record(number % 15, "anna" if number % 2 else "bert")
            try:
                catalog.add([expiring], limits)
            except QuotaExceededError:
                refused.set()
            for each in catalog.list("anna", NOW, limit=3).items[:1]:
                with suppress(ContextCacheNotFoundError):  # somebody else was first
                    catalog.delete(each.id, "anna", NOW)
            catalog.expire(NOW)
            usage = catalog.usage("bert")
            assert usage.caches <= 12
            assert usage.bytes <= 100

    def join() -> None:
        for _ in range(5):
            Catalog(url).close()

    run_threads(
        *(lambda c=each, n=index: write(c, 7 * n) for index, each in enumerate(catalogs)), join
    )
    assert refused.is_set()
    assert catalogs[0].check() == ()
    assert {each.usage("bert") for each in catalogs} == {catalogs[0].usage("bert")}
    for each in catalogs:
        each.close()


def test_a_restart_is_not_noticed(frail_postgres: PostgresServer) -> None:
    """All connections are cut, and each is replaced when it is next used."""
    with closing(Catalog(frail_postgres.new_database())) as catalog:
        kept = record(1)
        catalog.add([kept])
        catalog.persist()
        run_threads(*[lambda: catalog.get(kept.id, "anna", NOW)] * 6)
        frail_postgres.kill()
        frail_postgres.start()
        assert catalog.get(kept.id, "anna", NOW) == kept
        catalog.add([record(2)])
        assert catalog.usage("anna").caches == 2


@pytest.mark.whole
def test_an_outage_is_told_and_ends(frail_postgres: PostgresServer) -> None:
    with closing(Catalog(frail_postgres.new_database())) as catalog:
        kept = record(1)
        catalog.add([kept])
        catalog.persist()
        frail_postgres.kill()
        for call in (
            lambda: catalog.get(kept.id, "anna", NOW),
            lambda: catalog.add([record(2)]),
            lambda: catalog.persist(),
        ):
            with pytest.raises(CatalogUnavailableError, match="does not answer"):
                call()
        began = time.monotonic()
        for _ in range(20):
            with pytest.raises(CatalogUnavailableError):
                catalog.get(kept.id, "anna", NOW)
        assert time.monotonic() - began < 10 * postgresql.CONNECT_SECONDS, "each waits anew"
        frail_postgres.start()

        def is_back() -> bool:
            try:
                return catalog.get(kept.id, "anna", NOW) == kept
            except CatalogUnavailableError:
                return False

        wait_until(is_back)
        catalog.add([record(2)])


@pytest.mark.whole
def test_a_database_that_hangs_is_given_up(
    frail_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It acknowledges what it gets, so that TCP waits for ever."""
    monkeypatch.setattr(postgresql, "READ_SECONDS", 1.0)
    monkeypatch.setattr(postgresql, "WRITE_SECONDS", 1.0)
    with closing(Catalog(frail_postgres.new_database())) as catalog:
        kept = record(1)
        catalog.add([kept])
        run_threads(*[lambda: catalog.get(kept.id, "anna", NOW)] * 6)
        frail_postgres.hang()
        calls = (
            lambda: catalog.get(kept.id, "anna", NOW),
            lambda: catalog.add([record(2)]),
            lambda: catalog.persist(),
        )
        refused: list[float] = []

        def ask(call: Callable[[], object]) -> None:
            began = time.monotonic()
            with pytest.raises(CatalogUnavailableError, match="does not answer"):
                call()
            refused.append(time.monotonic() - began)

        try:
            run_threads(*[partial(ask, call) for call in calls * 4])
            assert len(refused) == 12
            assert max(refused) < 1.0 + postgresql.CONNECT_SECONDS + 5.0
            for call in calls:
                ask(call)
        finally:
            frail_postgres.go_on()

        def is_back() -> bool:
            try:
                return catalog.get(kept.id, "anna", NOW) == kept
            except CatalogUnavailableError:
                return False

        wait_until(is_back)
        catalog.add([record(2)])


def test_a_server_that_stops_inside_a_transaction_holds_up_the_others_for_a_while_only(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgresql, "_SESSION", postgresql._SESSION.replace("'30s'", "'300ms'"))

    def stop(catalog: Catalog) -> None:
        with catalog._database.transaction() as connection:
            connection.execute("DELETE FROM context_caches")
            other.add([record(1)])
            connection.execute("DELETE FROM context_caches")

    with closing(Catalog(url)) as stopped, closing(Catalog(url)) as other:
        with pytest.raises(StoreError):
            stop(stopped)
        assert other.usage("anna").caches == 1


@pytest.mark.parametrize(("step", "age"), [(1, "a newer"), (-1, "an older")])
def test_another_version_is_refused_and_left_as_it_is(url: str, step: int, age: str) -> None:
    with closing(Catalog(url)) as catalog:
        add(catalog, text_record("A dog sleeps."))
    harm(url, "UPDATE version SET number = ?", POSTGRES_VERSION + step)
    harm(url, "DROP INDEX texts_by_word")

    def contents() -> list[object]:
        relations = harm(
            url, "SELECT relname FROM pg_class WHERE relnamespace = ?::regnamespace", SCHEMA
        )
        tables = ("version", "context_caches", "chunks", "texts", "tenants")
        return [sorted(relations), *(harm(url, f"SELECT * FROM {table}") for table in tables)]

    before = contents()
    with pytest.raises(StoreError, match=f"was written by {age} kvlinker"):
        Catalog(url)
    assert contents() == before


def test_tables_of_others_are_left_alone(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE chunks (something TEXT)")
    with closing(Catalog(url)) as catalog:
        catalog.add([record(1)])
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT * FROM public.chunks").fetchall() == []


@pytest.mark.whole
@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("postgresql://me:hush@127.0.0.1:1/none", "127.0.0.1:1/none does not answer"),
        ("postgresql://me:hush@[", "not a URL of PostgreSQL"),
    ],
)
def test_a_place_that_cannot_be_used_is_named_without_its_password(url: str, message: str) -> None:
    with pytest.raises(StoreError) as raised:
        Catalog(url)
    assert message in raised.value.message
    assert "hush" not in raised.value.message


def test_a_key_waits_for_those_who_have_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cryptography")
    monkeypatch.setattr(postgresql, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr("kvlinker.store.catalog.encryption.PATIENCE_SECONDS", 0.2)
    kept = record(1)
    with closing(Catalog(url)) as plain:
        plain.add([kept])
        with pytest.raises(StoreError, match="in use"):
            Catalog(url, Cipher(bytes(32)))
    with closing(Catalog(url, Cipher(bytes(32)))) as sealed:
        assert sealed.get(kept.id, "anna", NOW) == kept
        with pytest.raises(StoreError, match="is encrypted"):
            Catalog(url)
        ((tokens,),) = harm(url, "SELECT tokens FROM chunks")
        assert tokens != bytes([1, 0, 0, 0, 7, 0, 0, 0, 8, 0, 0, 0])


def test_the_search_differs_from_sqlites_as_documented(catalog: Catalog) -> None:
    """Common words and accents: see docs/api.md."""
    add(catalog, *map(text_record, ("The cat runs.", "A dog sleeps.", "Ein färöischer Hund.")))
    assert [hit.text for hit in search(catalog, "running")] == ["The cat runs."]
    assert search(catalog, "the") == (), "a common word is not searched for"
    assert search(catalog, "faroischer") == (), "accents count"
    assert [hit.text for hit in search(catalog, "FÄRÖISCHER")] == ["Ein färöischer Hund."]


def test_texts_that_have_more_of_the_words_are_first(catalog: Catalog) -> None:
    add(catalog, *map(text_record, ("cat cat cat cat", "cat and dog", "cat, dog and bird")))
    hits = search(catalog, "bird dog cat")
    assert [hit.text for hit in hits] == ["cat, dog and bird", "cat and dog", "cat cat cat cat"]


def test_the_beginning_of_any_text_is_searched(catalog: Catalog) -> None:
    """PostgreSQL takes 1 MiB of words for a text, and each hyphenated one as a whole and by its
    parts."""
    letters = [chr(0x20000 + number) for number in range(40_000)]  # of four bytes
    words = [letters[n] + letters[step * n % 40_000] for step in (7, 11) for n in range(33_000)]
    hyphenated = " ".join(map("-".join, zip(words[::2], words[1::2], strict=True)))
    assert len(hyphenated) < SEARCHED_CHARACTERS
    long, hyphens, short = map(
        text_record,
        (f"cat {'x1 x2 x3 x4 ' * 30_000} dog", f"cat {hyphenated} dog", "A dog sleeps."),
    )
    add(catalog, hyphens, long, short)
    assert {hit.id for hit in search(catalog, "cat")} == {long.id, hyphens.id}
    assert [hit.id for hit in search(catalog, "dog")] == [short.id]


def test_statements_are_translated() -> None:
    assert translated(
        "SELECT k.a::text FROM x k INDEXED BY y CROSS JOIN z ON k.b = :b_1 WHERE c LIKE '%' AND d"
        " IN (SELECT value FROM json_each(:many)) AND e = ?"
    ) == (
        "SELECT k.a::text FROM x k  JOIN z ON k.b = %(b_1)s WHERE c LIKE '%%' AND d ="
        " ANY(ARRAY(SELECT"
        " value FROM jsonb_array_elements_text(CAST(%(many)s AS jsonb)) AS each(value))) AND e = %s"
    )


def plans_of(url: str, catalog: Catalog, ask: Callable[[], object]) -> list[str]:
    """Return PostgreSQL's plans for what is asked of the catalog, by its statistics of now."""
    harm(url, "ANALYZE")
    database = catalog._database
    with mock.patch.object(database, "query", wraps=database.query) as asked:
        ask()
    explained = (
        database.query(f"EXPLAIN {call.args[0]}", call.args[1]) for call in asked.mock_calls
    )
    return ["\n".join(line for (line,) in rows) for rows in explained]


def test_a_query_takes_its_indexes(url: str, catalog: Catalog) -> None:
    """Those of every request: by id, and by content."""
    catalog.add([record(number) for number in range(3000)])

    def ask() -> None:
        catalog.get_many(["cc_1", "cc_2"], "anna", NOW)
        catalog.implicit.find({"a", "b"}, "anna", "weights", NOW)

    plans = plans_of(url, catalog, ask)
    assert plans
    assert all("Seq Scan" not in plan for plan in plans), plans


def test_a_small_tenants_search_takes_its_own_texts(url: str, catalog: Catalog) -> None:
    """Not those of all tenants that have the word."""
    catalog.add([record(number) for number in range(3000)])
    harm(
        url,
        "INSERT INTO texts (tenant, key, text)"
        " SELECT CASE WHEN row_number() OVER () <= 20 THEN 'small' ELSE 'big' END, key, 'a cat'"
        " FROM chunks",
    )
    (plan,) = plans_of(url, catalog, lambda: search(catalog, "cat", tenant="small"))
    assert "texts_by_tenant" in plan


def test_no_text_is_an_outage_for_others(catalog: Catalog) -> None:
    """Words that no index takes, and characters that PostgreSQL does not."""
    monstrous = text_record("".join(f"{number:x}" for number in range(4000)))
    add(catalog, monstrous, text_record("a cat\0and a dog"))
    assert [hit.text for hit in search(catalog, "dog")] == ["a cat and a dog"]
    assert catalog.get("cc_\0", "anna", NOW) is None
    with pytest.raises(InvalidRequestError, match="cannot hold this"):
        catalog.update(monstrous.id, "anna", NOW, name="a\0b")
    assert catalog.get(monstrous.id, "anna", NOW) is not None


def test_writers_that_wait_do_not_hold_up_readers(url: str) -> None:
    with closing(Catalog(url)) as other, closing(Catalog(url)) as catalog:
        kept = record(1)
        catalog.add([kept])
        with other._database.transaction():
            writers = [
                threading.Thread(target=catalog.add, args=([record(n)],)) for n in range(2, 14)
            ]
            for writer in writers:
                writer.start()
            for _ in range(5):
                assert catalog.get(kept.id, "anna", NOW) == kept
        for writer in writers:
            writer.join()
        assert catalog.usage("anna").caches == 13


def test_who_lost_the_lock_writes_nothing_with_an_old_key(frail_postgres: PostgresServer) -> None:
    pytest.importorskip("cryptography")
    url = frail_postgres.new_database()
    with closing(Catalog(url)) as running:
        running.add([record(1)])
        running.persist()
        frail_postgres.kill()
        frail_postgres.start()
        with closing(Catalog(url, Cipher(bytes(32)))) as encrypted:
            encrypted.add([record(2)])
            with pytest.raises(StoreError, match="was changed while it was in use"):
                running.add([record(3)])
            assert encrypted.usage("anna").caches == 2


def test_servers_that_bring_a_key_at_once_encrypt_once(url: str) -> None:
    pytest.importorskip("cryptography")
    with closing(Catalog(url)) as plain:
        plain.add([record(number) for number in range(50)])
    opened: list[Catalog] = []
    run_threads(*[lambda: opened.append(Catalog(url, Cipher(bytes(32))))] * 4)
    assert len(opened) == 4
    for each in opened:
        assert each.usage("anna").caches == 50
        each.close()
