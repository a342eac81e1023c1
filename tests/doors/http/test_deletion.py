"""What is deleted or expired is gone from every tier: bytes on disk, memory, writes that still
wait, and variants."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlinker.base.types.chunks import chunk_key, place_keys, with_places
from kvlinker.base.types.tenants import DEFAULT_TENANT
from kvlinker.cli import app
from kvlinker.llm import LLM
from kvlinker.store import ContextCache
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.waiting import wait_until

TEXTS = ("The first chunk speaks of plums.", "The second, of pears and their trees.")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def llm(state: Path) -> Iterator[LLM]:
    with started(state) as llm:
        yield llm


def started(state: Path) -> LLM:
    return LLM.from_model(tiny_model(), tiny_settings(state))


def files(state: Path) -> list[Path]:
    return [path for path in (state / "chunks").rglob("*") if path.is_file()]


def nothing_left(llm: LLM, state: Path) -> bool:
    llm.store.flush()
    return not (
        files(state) or llm.store.keys() or any(tier.used_bytes for tier in llm.store.usage())
    )


def with_variants(llm: LLM) -> tuple[ContextCache, ...]:
    """Context caches whose chunks have variants too."""
    caches = llm.generate_context_cache(TEXTS, metadata={"k": "v"})
    content = [{"type": "text", "text": "Look: "}, *caches[::-1], "What now?"]
    llm.chat_completion([{"role": "user", "content": content}], policy="prefix", max_tokens=1)
    wait_until(lambda: len(llm.catalog.chunk_keys()) == 4)
    return caches


def test_deletion_takes_variants_along(llm: LLM, state: Path) -> None:
    first, second = with_variants(llm)
    llm.store.flush()
    assert len(files(state)) == 4
    llm.expire_cache(first)
    llm.store.flush()
    assert len(files(state)) == 2
    llm.expire_cache(second)
    assert nothing_left(llm, state)


def test_deletion_by_metadata(llm: LLM, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlinker.service.context_caches.caches.DELETED_AT_ONCE", 2)
    with_variants(llm)
    llm.generate_context_cache(["a", "b", "c", "a"], metadata={"k": "v"})
    assert llm.expire_caches({"k": "v"}) == 6
    assert nothing_left(llm, state)


def test_deletion_overtakes_writes_that_wait(llm: LLM, state: Path) -> None:
    for caches in [
        llm.generate_context_cache([f"text {number} {n}" for n in range(20)]) for number in range(3)
    ]:
        for cache in caches:
            llm.expire_cache(cache)
    assert nothing_left(llm, state)


def test_what_expired_while_nothing_ran_is_gone_at_the_start(state: Path) -> None:
    with started(state) as llm:
        for cache in llm.generate_context_cache(TEXTS):
            llm.catalog.update(cache.id, cache.tenant, time.time(), expires_at=time.time() - 1)
    assert len(files(state)) == 2
    with started(state) as llm:
        assert nothing_left(llm, state)


def test_a_deletion_that_a_crash_broke_off_is_finished_at_the_start(state: Path) -> None:
    with started(state) as llm:
        (cache,) = llm.generate_context_cache(TEXTS[:1])
        llm.store.flush()
        llm.catalog.delete(cache.id, cache.tenant, time.time())
    assert len(files(state)) == 1
    with started(state) as llm:
        assert nothing_left(llm, state)


def test_what_a_running_request_stored_again_goes_with_the_next_sweep(
    llm: LLM, state: Path
) -> None:
    (cache,) = llm.generate_context_cache(TEXTS[:1])
    llm.expire_cache(cache)
    llm.engine.cache_chunk(cache.chunk, tenant="default").result()
    assert not nothing_left(llm, state)
    llm.caches.sweep()
    assert nothing_left(llm, state)
    (again,) = llm.generate_context_cache(TEXTS[:1])
    llm.caches.sweep()
    assert llm.store.tier_of(again.chunk_key) == "host"


def test_deletion_takes_kv_at_all_places_along(llm: LLM, state: Path) -> None:
    first, second = llm.generate_context_cache(TEXTS)
    messages = [{"role": "user", "content": [first, second, "What now?"]}]
    llm.chat_completion(messages, policy="row", max_tokens=1)
    wait_until(lambda: len(llm.store.keys()) == 4)  # each also behind the other
    llm.store.flush()
    assert len(files(state)) == 4
    llm.caches.delete(first.id, tenant=DEFAULT_TENANT)
    assert llm.store.keys() == {second.chunk_key, place_keys(second.chunk_key)[0]}
    llm.caches.delete(second.id, tenant=DEFAULT_TENANT)
    assert nothing_left(llm, state)


def test_a_running_server_follows_what_another_process_deletes_and_pins(
    llm: LLM, state: Path
) -> None:
    first, second = llm.generate_context_cache(TEXTS)
    llm.store.flush()
    for arguments in (["rm", first.id], ["pin", second.id]):
        assert (
            CliRunner().invoke(app, ["caches", *arguments, "--state-dir", str(state)]).exit_code
            == 0
        )
    assert llm.store.keys() == {first.chunk_key, second.chunk_key}
    llm.caches.sweep()
    assert llm.store.keys() == {second.chunk_key}
    kept = with_places([second.chunk_key])
    host, disk = llm.store._tiers
    assert host._index._pinned_keys == disk._index._pinned_keys == kept  # type: ignore[attr-defined]


def test_pins_last_through_a_restart(state: Path) -> None:
    with started(state) as llm:
        pinned, _ = (
            llm.generate_context_cache([text], pinned=text == TEXTS[0])[0] for text in TEXTS
        )
        size = llm.store.nbytes(pinned.chunk_key) or 0
    small = tiny_settings(state, disk_space=4 * size)
    with LLM.from_model(tiny_model(), small) as llm:
        for number in range(10):
            llm.generate_context_cache([f"{number} takes the room of those that came before"])
        llm.store.flush()
        (disk,) = llm.store._tiers[1:]
        assert disk.contains(pinned.chunk_key)
        assert disk.used_bytes <= disk.budget_bytes < 12 * size


def test_variants_of_shared_chunks_are_each_tenants_own(llm: LLM, state: Path) -> None:
    (shared,) = llm.generate_context_cache(["A corpus for all of us."], scope="shared")
    for tenant in ("anna", "bert"):
        content = [{"type": "text", "text": f"{tenant}'s secret"}, shared, "So?"]
        llm.chat_completion(
            [{"role": "user", "content": content}], policy="prefix", tenant=tenant, max_tokens=1
        )
    wait_until(lambda: len(llm.catalog.chunk_keys()) >= 3)
    variants = llm.catalog.chunk_keys().keys() - {shared.chunk_key}
    assert len(variants) == 2
    assert all(len(llm.catalog.keys_of(tenant)) == 1 for tenant in ("anna", "bert", "shared"))
    assert (
        chunk_key(shared.chunk, fingerprint=shared.fingerprint, tenant="anna") == shared.chunk_key
    )
    llm.expire_cache(shared)
    assert nothing_left(llm, state)
