"""KV that was computed for one tenant is never used for another: every KV of one is made garbage, and the other's
log probabilities stay what they are on a server of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.embedded.engine import EmbeddedEngine
from kvlinker.llm import LLM
from kvlinker.store.chunk_kv import ChunkKV, LayerKV, changed
from kvlinker.types.chunks import Chunk, chunk_key
from kvlinker.types.context_cache import ContextCache
from tests.redis_server import RedisServer
from tests.server.serving import tiny_model, tiny_settings

TEXTS = [
    "The kettle stands in the kitchen, and it is green, as all the others in that house have been since spring.",
    "The bicycle stands in the hall, and it is red, for somebody has painted it with what was left of the door.",
    "The ladder stands in the shed, and it is blue, which nobody who had to climb it in the dark has ever noticed.",
]
VARIANTS = "cachecraft-1"
"""Asked once, and last: a tenant's own variants, which are made while the engine is idle, may change what follows."""
POLICIES = ["full", "naive", "legolink-4", "h2o-30", "query-10", VARIANTS]
QUESTION = "Which of them is red?"


@pytest.fixture(params=["disk", "redis"])
def make_llm(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[str], LLM]]:
    """Makes servers' LLMs with everything on that keeps KV; its pool is small, so that prefixes are spilled."""
    made: list[LLM] = []

    def make(name: str) -> LLM:
        where: dict[str, Any] = {}
        if request.param == "redis":
            server: RedisServer = request.getfixturevalue("redis_server")
            server.client.flushall()
            where = {"redis_url": f"redis://127.0.0.1:{server.port}/0"}
        settings = tiny_settings(
            tmp_path / name, **where, prefix_cache="on", kv_slots=2048, audit=1, implicit="auto", implicit_ttl=600
        )
        made.append(LLM.from_model(tiny_model(), settings))
        return made[-1]

    yield make
    for llm in made:
        llm.close()


def answers_of(
    llm: LLM, tenant: str, shared: list[ContextCache], *, first: int = 0, salt: str = ""
) -> list[list[float]]:
    """Log probabilities of a tenant's answers, by all ways in which KV is reused; ``first`` is the text that stands
    before the others. No policy begins as another one did, nor as with another ``salt``: it has to link."""
    mine = llm.caches.create(TEXTS, tenant=tenant).result()
    order = [mine[first], *(cache for cache in mine if cache != mine[first])]
    prompts: list[Any] = [
        [*order, QUESTION],
        [order[1], shared[0], order[2], QUESTION],
        [*({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}} for text in TEXTS), QUESTION],
        "\n".join([*TEXTS, QUESTION]),
    ]
    found = []
    for policy in POLICIES:
        for prompt in prompts[:1] if policy == VARIANTS else prompts:
            answer = llm.chat_completion(
                [{"role": "system", "content": f"{salt}{policy}"}, {"role": "user", "content": prompt}],
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
    made = changed(kv, lambda _, layer: LayerKV(torch.full_like(layer.key, 3.0), torch.full_like(layer.value, 50.0)))
    scores = kv.scores and dataclasses.replace(
        kv.scores, inter=kv.scores.inter[::-1].copy(), received=np.zeros_like(kv.scores.received)
    )
    return dataclasses.replace(made, scores=scores)


def poison(llm: LLM, spared: set[str]) -> None:
    """Make garbage of all KV: in the pool, in memory, on disk and in Redis, but for the ``spared`` keys."""
    llm.store.flush()
    for key in llm.store.keys() - spared:
        kv = llm.store.get_computed(key)
        if kv is not None:
            llm.store.delete(key)
            llm.store.put(key, garbage(kv))
    llm.store.flush()
    assert isinstance(llm.engine, EmbeddedEngine)
    pool = llm.engine.runner.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(50.0)


@pytest.mark.slow
def test_garbage_in_one_tenants_kv_changes_nothing_for_another(make_llm: Callable[[str], LLM]) -> None:
    alone = make_llm("alone")
    expected = answers_of(alone, "b", share(alone))
    linked_anew = answers_of(alone, "b", share(alone), salt="again ")
    both = make_llm("both")
    common = share(both)
    answers_of(both, "a", common)
    answers_of(both, "a", common, first=1)
    poison(both, {cache.chunk_key for cache in common})
    np.testing.assert_allclose(answers_of(both, "b", common), expected, atol=1e-4)
    again = answers_of(both, "a", common, salt="again ")
    moved = np.abs(np.subtract(again, linked_anew)).max(axis=1) > 1e-4
    assert moved.mean() > 0.25, "garbage is in what the tenant's own answers are made of"


def share(llm: LLM) -> list[ContextCache]:
    return list(llm.generate_context_cache([TEXTS[0][::-1]], scope="shared"))


def parts_of_keys() -> st.SearchStrategy[tuple[str, Chunk]]:
    tokens = st.lists(st.integers(0, 3), max_size=4).map(tuple)
    chunks = st.builds(Chunk, tokens, tokens, shared=st.booleans())
    return st.tuples(st.sampled_from(["a", "b", "ab", "key-0"]), chunks)


@given(parts_of_keys(), parts_of_keys())
def test_equal_keys_mean_equal_owners_contexts_and_tokens(one: tuple[str, Chunk], other: tuple[str, Chunk]) -> None:
    keys = [chunk_key(chunk, fingerprint="model", tenant=tenant) for tenant, chunk in (one, other)]
    owners = ["shared" if chunk.shared else tenant for tenant, chunk in (one, other)]
    is_same = owners[0] == owners[1] and one[1].tokens == other[1].tokens and one[1].prefix == other[1].prefix
    assert (keys[0] == keys[1]) == is_same
