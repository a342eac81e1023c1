"""KV that was computed for one tenant is never used for another: every KV of one is made garbage,
and the other's log probabilities stay what they are on a server of its own."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.base.types.chunks import Chunk, ContextCache, chunk_key
from kvlinker.engines.embedded.chunks.builder import ChunkBuilder
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.engines.embedded.requests.request import Request
from kvlinker.engines.embedded.scheduling.scheduler import Scheduler
from kvlinker.llm import LLM
from kvlinker.store import ChunkStore
from kvlinker.store.chunk_kv import ChunkKV, LayerKV, changed
from kvlinker.store.format.chunk_file import encode_chunk, read_chunk_file, write_chunk_file
from kvlinker.store.loading.bandwidths import Bandwidths
from kvlinker.store.prefixes import SpilledPrefixes
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.redis_server import RedisServer
from tests.waiting import PATIENCE

TEXTS = [
    (
        "The kettle stands in the kitchen, and it is green, as all the others in that house have"
        " been since spring."
    ),
    (
        "The bicycle stands in the hall, and it is red, for somebody has painted it with what was"
        " left of the door."
    ),
    (
        "The ladder stands in the shed, and it is blue, which nobody who had to climb it in the"
        " dark has ever noticed."
    ),
]
POLICIES = ["full", "naive", "legolink-4", "set-prefix", "h2o-30", "query-10", "cachecraft-1"]
VARIANT_POLICIES = ["prefix", "set-prefix", "cachecraft-1"]
QUESTION = "Which of them is red?"


MakeLLM = Callable[..., LLM]


@pytest.fixture
def make_llm(tmp_path: Path) -> Iterator[MakeLLM]:
    """Makes servers' LLMs with everything on that keeps KV, but for variants and later places:
    those are made while the engine is idle, so that answers would depend on when that is. The pool
    is small, so that prefixes are spilled."""
    made: list[LLM] = []

    def make(name: str, **options: Any) -> LLM:
        defaults = {
            "policy": "query-5-sensitive",
            "prefix_cache": "on",
            "kv_slots": 2048,
            "audit": 1,
            "implicit": "auto",
            "implicit_ttl": 600,
        }
        settings = tiny_settings(tmp_path / name, **(defaults | {"max_variants": 0} | options))
        made.append(LLM.from_model(tiny_model(dtype="float32"), settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


@pytest.fixture(params=["disk", "redis"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of where chunks are kept; with Redis, there alone, so that every reading of KV is
    one from there. They are read even where a model as small as the tests' computes them sooner."""
    monkeypatch.setattr(Bandwidths, "worth_loading", lambda *_: True)
    if request.param == "disk":
        return {}
    server: RedisServer = request.getfixturevalue("redis_server")
    return {"redis_url": server.url, "host_memory": 0, "disk_space": 0}


def answers_of(
    llm: LLM, tenant: str, shared: list[ContextCache], *, first: int = 0, salt: str = ""
) -> list[list[float]]:
    """Log probabilities of a tenant's answers, by all ways in which KV is reused; ``first`` is the
    text that stands before the others. No policy begins as another one did, nor as with another
    ``salt``: it has to link."""
    mine = llm.caches.create(TEXTS, tenant=tenant).result()
    order = [mine[first], *(cache for cache in mine if cache != mine[first])]
    prompts: list[Any] = [
        [*order, QUESTION],
        [order[1], shared[0], order[2], QUESTION],
        [
            *(
                {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
                for text in TEXTS
            ),
            QUESTION,
        ],
        "\n".join([*TEXTS, QUESTION]),
    ]
    found = []
    for policy in POLICIES:
        for prompt in prompts:
            answer = llm.chat_completion(
                [
                    {"role": "system", "content": f"{salt}{policy}"},
                    {"role": "user", "content": prompt},
                ],
                policy=policy,
                tenant=tenant,
                max_tokens=3,
                temperature=0,
                logprobs=0,
                ignore_eos=True,
            )
            found.append([entry.logprob for entry in answer.logprobs])
    return found


def garbage(kv: ChunkKV) -> ChunkKV:
    made = changed(
        kv,
        lambda _, layer: LayerKV(
            torch.full_like(layer.key, 3.0), torch.full_like(layer.value, 50.0)
        ),
    )
    scores = kv.scores and dataclasses.replace(
        kv.scores, inter=kv.scores.inter[::-1].copy(), received=np.zeros_like(kv.scores.received)
    )
    return dataclasses.replace(made, scores=scores)


def poison(llm: LLM, spared: set[str]) -> int:
    """Make garbage of all KV in the pool, and of chunks wherever they are, but for the ``spared``
    keys; returns how many chunks that were."""
    llm.store.flush()
    poisoned = 0
    for key in llm.store.keys() - spared:
        kv = llm.store.get_computed(key)
        if kv is not None:
            llm.store.delete(key)
            llm.store.put(key, garbage(kv))
            poisoned += 1
    llm.store.flush()
    pool = engine_of(llm).runner.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(50.0)
    return poisoned


def engine_of(llm: LLM) -> EmbeddedEngine:
    assert isinstance(llm.engine, EmbeddedEngine)
    return llm.engine


def moved(found: list[list[float]], expected: list[list[float]]) -> float:
    """The share of answers that are not what was expected."""
    return float((np.abs(np.subtract(found, expected)).max(axis=1) > 1e-4).mean())


def empty(llm: LLM) -> None:
    """Leave nothing for a server on the same Redis."""
    llm.store.flush()
    keys = llm.store.keys()
    for key in keys:
        llm.store.delete(key)


@pytest.mark.whole
def test_garbage_in_one_tenants_kv_changes_nothing_for_another(
    make_llm: MakeLLM, where: dict[str, Any]
) -> None:
    alone = make_llm("alone", **where)
    expected = answers_of(alone, "b", share(alone))
    linked_anew = answers_of(alone, "b", share(alone), salt="again ")
    empty(alone)
    both = make_llm("both", **where)
    common = share(both)
    answers_of(both, "a", common)
    answers_of(both, "a", common, first=1)
    assert poison(both, {cache.chunk_key for cache in common}) >= len(TEXTS)
    np.testing.assert_allclose(answers_of(both, "b", common), expected, atol=1e-4)
    again = answers_of(both, "a", common, salt="again ")
    assert moved(again, linked_anew) > 0.25, (
        "garbage is in what the tenant's own answers are made of"
    )


def ask(llm: LLM, tenant: str, prompt: Sequence[Any], policy: str) -> list[float]:
    """Log probabilities of an answer, after which the engine has nothing left to do: variants are
    stored then."""
    answer = llm.chat_completion(
        [{"role": "system", "content": policy}, {"role": "user", "content": prompt}],
        policy=policy,
        tenant=tenant,
        max_tokens=3,
        temperature=0,
        logprobs=0,
        ignore_eos=True,
    )
    engine = engine_of(llm)
    deadline = time.monotonic() + 10
    for _ in range(2):  # a variant is offered, computed, and stored
        engine._background.submit(int).result(timeout=PATIENCE)
        while not engine.scheduler.idle and time.monotonic() < deadline:
            time.sleep(0.002)
    engine._background.submit(int).result(timeout=PATIENCE)
    assert engine.scheduler.idle
    return [entry.logprob for entry in answer.logprobs]


@pytest.mark.whole
def test_variants_that_one_tenant_made_of_shared_chunks_serve_it_alone(make_llm: MakeLLM) -> None:
    """The other one asks for the same, in the same order, and again, when it has variants of its
    own."""

    def answers(llm: LLM, tenant: str, shared: list[ContextCache]) -> list[list[float]]:
        (mine,) = llm.caches.create(TEXTS[:1], tenant=tenant).result()
        return [
            ask(llm, tenant, [*order, QUESTION], policy)
            for policy in VARIANT_POLICIES
            for order in ([mine, *shared], [mine, *shared[::-1]], [mine, *shared])
        ]

    # What a prompt's beginning left in the pool would hide what it is linked from.
    options = {"max_variants": 1000, "prefix_cache": "off", "audit": 0}
    alone, both = make_llm("alone", **options), make_llm("both", **options)
    shared = {
        llm: list(llm.generate_context_cache(TEXTS[1:], scope="shared")) for llm in (alone, both)
    }
    expected = answers(alone, "b", shared[alone])
    settled = answers(alone, "b", shared[alone])
    answers(both, "a", shared[both])
    spared = {cache.chunk_key for cache in shared[both]}
    assert poison(both, spared) > len(TEXTS), "variants among them"
    np.testing.assert_allclose(answers(both, "b", shared[both]), expected, atol=1e-4)
    np.testing.assert_allclose(answers(both, "b", shared[both]), settled, atol=1e-4)
    assert moved(answers(both, "a", shared[both]), settled) > 0.5


@pytest.mark.whole
def test_garbage_in_one_tenants_spilled_prefixes_changes_nothing_for_another(
    make_llm: MakeLLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[SpilledPrefixes] = []
    keep = ChunkStore.keep_prefixes

    def kept(store: ChunkStore, computation: str) -> SpilledPrefixes | None:
        prefixes = keep(store, computation)
        assert prefixes is not None
        made.append(prefixes)
        return prefixes

    monkeypatch.setattr(ChunkStore, "keep_prefixes", kept)
    monkeypatch.setattr(SpilledPrefixes, "pays", lambda self, nbytes, seconds: True)
    prompts = [f"{number} {text}" for number in range(4) for text in TEXTS]

    def answers(llm: LLM, tenant: str) -> list[list[float]]:
        return [ask(llm, tenant, prompt, "full") for prompt in prompts]

    options = {"kv_slots": 700, "implicit": "off", "audit": 0}
    expected = answers(make_llm("alone", **options), "b")
    both = make_llm("both", **options)
    answers(both, "a")
    made[-1].flush()
    files = list((tmp_path / "both").rglob("prefixes/**/*.safetensors"))
    assert files
    for path in files:
        kv = read_chunk_file(path, path.stem)
        with path.open("wb") as file:
            write_chunk_file(file, encode_chunk(path.stem, garbage(kv)))
    for _ in range(2):  # the second time from prefixes that it has spilled itself
        np.testing.assert_allclose(answers(both, "b"), expected, atol=1e-4)
    assert moved(answers(both, "a"), expected) > 0, "garbage is read where it is the tenant's own"


def test_chunks_that_come_again_are_not_taken_from_another_tenant(
    make_llm: MakeLLM, tmp_path: Path
) -> None:
    """One chunk was evicted, one is damaged on disk, and another tenant has both, as garbage."""
    llm = make_llm("both", host_memory=0, prefix_cache="off", audit=0)
    mine = llm.caches.create(TEXTS, tenant="b").result()
    prompt = [*mine, QUESTION]
    expected = ask(llm, "b", prompt, "naive")
    llm.caches.create(TEXTS, tenant="a").result()
    poison(llm, {cache.chunk_key for cache in mine})
    llm.store.delete(mine[0].chunk_key)
    (file,) = (tmp_path / "both").rglob(f"{mine[1].chunk_key}.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    np.testing.assert_allclose(ask(llm, "b", prompt, "naive"), expected, atol=1e-4)


def test_the_same_text_of_two_tenants_at_once_is_computed_twice(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenant's own second request waits for its first one."""
    entered: list[tuple[Request, Request]] = []
    all_there = threading.Event()
    enter, keep = Scheduler.enter, ChunkBuilder._keep

    def noted(scheduler: Any, request: Any) -> Any:
        entered.append((request, enter(scheduler, request)))
        if len(entered) == 3:
            all_there.set()
        return entered[-1][1]

    def held(
        builder: ChunkBuilder, keys: Sequence[str], kvs: Sequence[ChunkKV]
    ) -> tuple[ChunkKV, ...]:
        assert all_there.wait(10)
        return keep(builder, keys, kvs)

    llm = make_llm("both")
    monkeypatch.setattr(Scheduler, "enter", noted)
    monkeypatch.setattr(ChunkBuilder, "_keep", held)
    creations = [llm.caches.create(TEXTS[:1], tenant=tenant) for tenant in ("a", "b", "a")]
    keys = [creation.result(timeout=PATIENCE)[0].chunk_key for creation in creations]
    assert len({id(computed) for _, computed in entered}) == 2
    assert keys[0] == keys[2] != keys[1]
    kvs = [llm.store.get_resident(key) for key in keys[:2]]
    places = [
        layer.key.untyped_storage().data_ptr()
        for kv in kvs
        if kv is not None
        for layer in kv.layers
    ]
    assert len(set(places)) == len(places) > 0, "no bytes are shared"


def share(llm: LLM) -> list[ContextCache]:
    return list(llm.generate_context_cache([TEXTS[0][::-1]], scope="shared"))


def parts_of_keys() -> st.SearchStrategy[tuple[str, Chunk]]:
    tokens = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    chunks = st.builds(Chunk, tokens, tokens, shared=st.booleans())
    return st.tuples(st.sampled_from(["a", "b", "ab", "key-0"]), chunks)


@given(parts_of_keys(), parts_of_keys())
def test_equal_keys_mean_equal_owners_contexts_and_tokens(
    one: tuple[str, Chunk], other: tuple[str, Chunk]
) -> None:
    keys = [chunk_key(chunk, fingerprint="model", tenant=tenant) for tenant, chunk in (one, other)]
    owners = ["shared" if chunk.shared else tenant for tenant, chunk in (one, other)]
    is_same = (
        owners[0] == owners[1]
        and one[1].tokens == other[1].tokens
        and one[1].prefix == other[1].prefix
    )
    assert (keys[0] == keys[1]) == is_same
