"""Variants of chunks: created when the engine is idle, picked by reuse score, evicted by use."""

import time

import pytest
import torch

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.embedded.chunks.variants import VariantLibrary
from kvlinker.engines.embedded.engine import EmbeddedEngine
from kvlinker.linking import Variant, parse_policy
from kvlinker.linking.policies.cachecraft import context_impact, fix_overhead
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.settings import load_settings
from kvlinker.store import Catalog, ContextCache, new_context_cache_id
from kvlinker.store.chunk_kv import changed
from tests.engines.embedded.conftest import Bench, full_forward, random_tokens
from tests.engines.embedded.execution.test_oracle import TOLERANCE, true_chunk_kv
from tests.waiting import PATIENCE


class VariantBench(Bench):
    """An engine with a catalog that holds the chunks of its prompts, and a library of variants."""

    def __init__(self, path, family="llama", keeps=True, limit=64):
        """Without ``keeps``, the engine has no library."""
        super().__init__(family)
        self.engine.close()
        self.catalog = Catalog(path)
        self.library = VariantLibrary(
            self.catalog.variants, self.store, fingerprint=self.loaded.fingerprint, limit=limit
        )
        settings = load_settings(kv_slots=4096, max_step_tokens=64, prefix_cache="off")
        self.engine = EmbeddedEngine(
            self.loaded,
            store=self.store,
            events=self.events,
            settings=settings,
            variants=self.library if keeps else None,
        )

    def hold(self, prompt, tenant="default"):
        """Context caches for the prompt's chunks, with their KV in the store."""
        self.cache(prompt, tenant)
        records = [self.record(chunk, tenant) for chunk in prompt.chunks]
        self.catalog.add(records)
        return [record.id for record in records]

    def record(self, chunk, tenant):
        key = chunk_key(chunk, fingerprint=self.loaded.fingerprint, tenant=tenant)
        return ContextCache(
            id=new_context_cache_id(),
            tenant=tenant,
            model="toy",
            fingerprint=self.loaded.fingerprint,
            chunk=chunk,
            chunk_key=key,
            created_at=1.0,
        )

    def variants(self, chunk, tenant="default"):
        return self.library.variants(chunk, tenant)

    def rest(self):
        """Wait until all that goes on behind answers has ended: the prompts that were offered are
        looked through, their variants computed, and these stored."""
        for _ in range(2):
            self.engine._background.submit(int).result(PATIENCE)
            self.settle()

    def close(self):
        super().close()
        self.catalog.close()


@pytest.fixture
def variant_bench(tmp_path):
    made: list[VariantBench] = []

    def make(**options):
        made.append(VariantBench(tmp_path / f"catalog{len(made)}.sqlite", **options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def chunk(seed, length=30):
    return Chunk(random_tokens(length, [77, seed]))


def prompt_of(*chunks, header=4, fresh=9):
    return Prompt(
        (
            FreshSegment(random_tokens(header, 1)),
            *map(CachedSegment, chunks),
            FreshSegment(random_tokens(fresh, 2)),
        )
    )


FIRST, SECOND, THIRD, FOURTH = chunk(1, 31), chunk(2, 40), chunk(3, 25), chunk(4, 33)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "deepseek_v3-latents-interleaved"]
)
@pytest.mark.parametrize("policy", ["cachecraft-1", "prefix", "set-prefix"])
def test_a_prompt_that_comes_again_is_linked_exactly(variant_bench, family, policy):
    made = variant_bench(family=family)
    prompt = prompt_of(FIRST, SECOND, THIRD)
    made.hold(prompt)
    tokens, logprobs = full_forward(family, prompt, 3)
    before = made.answer(prompt, policy, max_tokens=3)
    assert before.finished.usage.recomputed_tokens > 0
    made.rest()
    assert len(made.variants(THIRD)) == 1
    after = made.answer(prompt, policy, max_tokens=3)
    assert after.finished.usage.recomputed_tokens == 0
    assert after.tokens == tokens
    torch.testing.assert_close(
        torch.tensor(after.logprobs), torch.tensor(logprobs), atol=TOLERANCE, rtol=0
    )


def test_a_prompt_of_more_chunks_than_variants_are_kept_is_computed_once(variant_bench):
    made = variant_bench(limit=2)
    prompt = prompt_of(FIRST, SECOND, THIRD, FOURTH)
    made.hold(prompt)
    for _ in range(2):
        made.answer(prompt, "cachecraft-1")
        made.rest()
        assert [len(made.variants(part)) for part in prompt.chunks] == [1, 1, 0, 0]
        assert made.library.missing(prompt, "default") == []


def test_tokens_are_read_only_where_a_variant_may_be_exact(variant_bench, monkeypatch):
    """A background thread looks through each prompt: it would else be quadratic in its chunks."""
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND, THIRD)
    read = []
    before = Prompt.tokens_before

    def counted(self, index):
        read.append(index)
        return before(self, index)

    monkeypatch.setattr(Prompt, "tokens_before", counted)
    assert made.library.missing(prompt, "default") == [0, 1, 2]
    assert read == []


def test_a_variants_kv_is_the_full_prefills(variant_bench):
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND, THIRD)
    made.hold(prompt)
    made.answer(prompt, "cachecraft-1")
    made.rest()
    assert len(made.variants(THIRD)) == 1
    for part, expected in zip(prompt.chunks, true_chunk_kv(made.loaded, prompt), strict=True):
        (variant,) = made.variants(part)
        kv = made.store.get(
            chunk_key(variant.chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        )
        for ours, true in zip(
            kv.layers, changed(expected, made.loaded.resident_form.resident).layers, strict=True
        ):
            torch.testing.assert_close(ours.key, true.key, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ours.value, true.value, atol=1e-5, rtol=1e-5)
        assert [before.content for before in variant.contextualization.context] == [
            c.content for c in prompt.chunks[: prompt.chunks.index(part)]
        ]


def test_cachecraft_takes_the_variant_whose_context_fits_best(variant_bench):
    made = variant_bench()
    made.hold(prompt_of(FIRST, SECOND, THIRD, FOURTH))
    for order in [(FIRST, SECOND, THIRD), (FOURTH, THIRD)]:
        made.answer(prompt_of(*order), "cachecraft-1")
        made.rest()
        assert not made.library.missing(prompt_of(*order), "default")
    stored = [Variant(THIRD, Contextualization(len(THIRD), intra=0.0)), *made.variants(THIRD)]
    assert len(stored) == 3
    for order in [
        (FIRST, THIRD),
        (FOURTH, FIRST, THIRD),
        (SECOND, FIRST, FOURTH, THIRD),
        (SECOND, FIRST, THIRD),
    ]:
        new = [part.content for part in order[:-1]]
        overheads = [fix_overhead(variant.contextualization, new) for variant in stored]
        request = GenerationRequest(prompt_of(*order), parse_policy("cachecraft-1"))
        explained = made.engine.explain(request).result(timeout=60)
        best = stored[overheads.index(min(overheads))]
        assert explained.segments[len(order)].computed_behind == len(best.chunk.prefix)
        by_name = {score.name: score for score in explained.scores if score.positions is None}
        assert by_name["cfo"].values[-1] == pytest.approx(min(overheads))
        assert by_name["cci"].values[-1] == pytest.approx(context_impact(best.contextualization))


def test_set_prefix_reorders_to_what_is_cached(variant_bench):
    made = variant_bench()
    made.hold(prompt_of(FIRST, SECOND, THIRD))
    made.answer(prompt_of(SECOND, FIRST), "prefix")
    made.rest()
    assert not made.library.missing(prompt_of(SECOND, FIRST), "default")

    def explain(policy):
        request = GenerationRequest(prompt_of(FIRST, THIRD, SECOND), parse_policy(policy))
        return made.engine.explain(request).result(timeout=60)

    assert explain("prefix").cost.cached_tokens == 0
    reordered = explain("set-prefix")
    assert [s.content for s in reordered.segments if s.kind == "chunk"] == [
        SECOND.content,
        FIRST.content,
        THIRD.content,
    ]
    assert reordered.cost.cached_tokens == len(SECOND) + len(FIRST)
    tokens, _ = full_forward("llama", prompt_of(SECOND, FIRST, THIRD), 3)
    assert made.answer(prompt_of(FIRST, THIRD, SECOND), "set-prefix", max_tokens=3).tokens == tokens


def test_the_least_reused_variants_make_room(variant_bench):
    made = variant_bench(limit=4)
    made.hold(prompt_of(FIRST, SECOND, THIRD, FOURTH))

    def serve(*order):
        made.answer(prompt_of(*order), "prefix")
        made.rest()
        assert not made.library.missing(prompt_of(*order), "default")

    serve(FIRST, SECOND)
    for _ in range(3):
        made.answer(prompt_of(FIRST, SECOND), "prefix")  # used often
        made.rest()
    serve(THIRD, FOURTH)
    serve(FOURTH, THIRD)
    assert not made.library.missing(prompt_of(FIRST, SECOND), "default")
    assert made.library.missing(prompt_of(THIRD, FOURTH), "default") == [0, 1]
    assert made.store.keys() == made.catalog.chunk_keys().keys()
    assert len(made.store.keys()) == 4 + 4
    assert made.catalog.released(0, time.time()), (
        "what went is told to tiers that did not hear of it"
    )


def test_no_variants_are_made_where_none_may_be_kept_or_wanted(variant_bench):
    made = variant_bench(keeps=False)
    other = variant_bench()
    prompt = prompt_of(FIRST, SECOND)
    for bench, policy in ((made, "cachecraft-1"), (other, "legolink-4")):
        bench.hold(prompt)
        bench.answer(prompt, policy)
        bench.rest()
        assert bench.variants(SECOND) == ()


def test_tenants_do_not_see_each_others_variants(variant_bench):
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND)
    made.hold(prompt, "one")
    made.hold(prompt, "two")
    made.submit(prompt, "prefix", tenant="one")[0].wait()
    made.rest()
    assert len(made.variants(SECOND, "one")) == 1
    assert made.variants(SECOND, "two") == ()


def test_variants_go_with_the_last_context_cache_of_their_chunk(variant_bench):
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND)
    first, second = made.hold(prompt)
    made.answer(prompt, "prefix")
    made.rest()
    assert len(made.variants(SECOND)) == 1
    (variant,) = made.variants(SECOND)
    key = chunk_key(variant.chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    assert key in made.catalog.delete(second, "default", 2.0)
    assert made.variants(SECOND) == ()
    assert len(made.variants(FIRST)) == 1
    assert made.library.missing(prompt, "default") == [1]
    made.answer(prompt, "prefix")  # computed again, but no context cache holds it
    made.rest()
    assert made.variants(SECOND) == ()
    assert first


def test_a_variant_that_the_store_lost_is_forgotten(variant_bench):
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND)
    made.hold(prompt)
    made.answer(prompt, "prefix")
    made.rest()
    assert len(made.variants(SECOND)) == 1
    (variant,) = made.variants(SECOND)
    made.store.delete(
        chunk_key(variant.chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    )
    assert made.variants(SECOND) == ()
    assert made.answer(prompt, "prefix").finished.usage.recomputed_tokens == len(SECOND)


def test_a_lost_variant_fails_nobody_while_the_catalog_cannot_be_written_to(variant_bench):
    """As on a full disk, from which variants are evicted, too."""
    made = variant_bench()
    prompt = prompt_of(FIRST, SECOND)
    made.hold(prompt)
    made.answer(prompt, "prefix")
    made.rest()
    (variant,) = made.variants(SECOND)
    key = chunk_key(variant.chunk, fingerprint=made.loaded.fingerprint, tenant="default")
    made.store.delete(key)
    made.catalog._database._connection.execute("PRAGMA query_only = ON")
    assert made.variants(SECOND) == ()
    assert made.answer(prompt, "prefix").finished.usage.recomputed_tokens == len(SECOND)
    made.rest()
    made.catalog._database._connection.execute("PRAGMA query_only = OFF")
