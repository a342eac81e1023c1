"""The store learns of every request once what it took of its chunks."""

import threading
from unittest import mock

import pytest

from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.embedded.engine import LOADERS
from kvlinker.store import ChunkStore
from tests.engines.embedded.conftest import linked_prompt
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def noted():
    """(key, recomputed) of all uses that any store is told of."""
    uses = []
    note = ChunkStore.note_use

    def noting(store, key, recomputed):
        uses.append((key, recomputed))
        note(store, key, recomputed)

    with mock.patch.object(ChunkStore, "note_use", noting):
        yield uses


@pytest.mark.parametrize(
    ("policy", "shares"),
    [
        ("naive", [0, 0]),
        ("legolink-4", [4 / 40, 4 / 20]),
        ("query-50", None),
        ("cacheblend-50", None),
        ("full", []),
    ],
)
def test_each_request_is_told_once(bench, noted, policy, shares):
    made = bench()
    prompt = linked_prompt(40, 20, header=3)
    made.cache(prompt)
    assert noted == []
    answer = made.answer(prompt, policy, max_tokens=5)
    made.close()
    keys = [
        chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        for chunk in prompt.chunks
    ]
    assert [key for key, _ in noted] == (keys if shares is None else keys[: len(shares)])
    if shares is not None:
        assert [share for _, share in noted] == pytest.approx(shares)
    else:
        recomputed = sum(
            share * len(chunk) for (_, share), chunk in zip(noted, prompt.chunks, strict=True)
        )
        assert recomputed == pytest.approx(answer.finished.usage.recomputed_tokens, abs=0.51)


def test_explanations_are_no_uses(bench, noted):
    made = bench()
    prompt = linked_prompt(40, 20, header=3)
    made.cache(prompt)
    made.explain(prompt, "naive")
    made.close()
    assert noted == []


def test_uses_are_told_while_all_loaders_are_busy(bench, noted, monkeypatch):
    made = bench()
    prompt = linked_prompt(40, 20, header=3)
    made.cache(prompt)
    find, loading, free = made.store.get_resident, threading.Semaphore(0), threading.Event()

    def held_up_find(key):
        loading.release()
        assert free.wait(PATIENCE)
        return find(key)

    with made.held() as held:
        computed = made.submit(prompt, "naive", max_tokens=1)[0]
        held.wait()
        monkeypatch.setattr(made.store, "get_resident", held_up_find)
        others = [made.submit(prompt, "naive", max_tokens=1)[0] for _ in range(LOADERS)]
        for _ in others:
            assert loading.acquire(timeout=PATIENCE)
    computed.wait()
    wait_until(lambda: len(noted) == 2)
    free.set()
    for other in others:
        other.wait()


def test_choices_are_one_use(bench, noted):
    made = bench()
    prompt = linked_prompt(40, 20, header=3)
    made.cache(prompt)
    outcomes, _ = made.submit_choices(prompt, 5, "naive")
    for outcome in outcomes:
        outcome.wait()
    made.close()
    assert len(noted) == 2
