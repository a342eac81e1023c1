"""Chunk scores that the engine collects, against the attention matrices of transformers."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.contract.observation import QUERIES_AT_ONCE
from kvlinker.engines.contract.sensitivity import UNRELATED_TEXT
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.store import DiskTier
from kvlinker.store.chunk_kv import changed
from tests.engines.embedded.chunks.test_layer_loading import forget_host
from tests.engines.embedded.conftest import linked_prompt, random_tokens
from tests.engines.embedded.execution.test_oracle import true_chunk_kv
from tests.engines.embedded.reference import chunk_attention, reference_model
from tests.toy_models import WINDOW, loaded_model

FAMILIES = [
    "llama",
    "gemma2-softcap",
    "gemma3",
    "gpt_oss-sinks",
    "mixtral-moe",
    "gpt_neox-partial",
    "mistral-window",
    "deepseek_v3-latents-interleaved",
]
assert_close = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)


def check(scores, attention, spans, index, names=()):
    """``scores`` of the chunk at ``spans[index]`` against the matrix ``attention`` [tokens,
    tokens]."""
    start, end = spans[index]
    known = scores.contextualization
    own = attention[start:end, start:end]
    inter = [attention[start:end, first:last] for first, last in spans[:index]]
    assert known.tokens == end - start
    assert_close(known.intra, np.tril(own, -1).sum())
    assert_close(scores.received, own.sum(0))
    assert_close(scores.inter, sum((part.sum(1) for part in inter), np.zeros(end - start)))
    assert [chunk.content for chunk in known.context] == list(names)[:index]
    assert [chunk.tokens for chunk in known.context] == [
        last - first for first, last in spans[:index]
    ]
    assert_close([chunk.attention for chunk in known.context], [part.sum() for part in inter])
    assert scores.inter.dtype == scores.received.dtype == np.float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [17, 512])
def test_a_chunk_alone_and_behind_a_prefix(bench, family, step):
    made = bench(family, max_step_tokens=step)
    chunks = [
        Chunk(random_tokens(QUERIES_AT_ONCE + 13, 1)),
        Chunk(random_tokens(1, 2)),
        Chunk(random_tokens(WINDOW + 9, 3), prefix=random_tokens(21, 4)),
    ]
    for future in [made.engine.cache_chunk(chunk, tenant="default") for chunk in chunks]:
        future.result(timeout=60)
    for chunk in chunks:
        key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        attention = chunk_attention(reference_model(family), [*chunk.prefix, *chunk.tokens])
        before = len(chunk.prefix)
        check(made.store.get(key).scores, attention, [(before, before + len(chunk))], 0)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [17, 512])
def test_sensitivity_is_how_far_kv_moves_behind_another_text(bench, family, step):
    made = bench(family, max_step_tokens=step)
    unrelated = made.loaded.tokenizer.encode(UNRELATED_TEXT, add_special_tokens=False)
    chunks = [
        Chunk(random_tokens(47, 1)),
        Chunk(random_tokens(1, 2)),
        Chunk(random_tokens(29, 3), random_tokens(5, 4)),
    ]
    for future in [made.engine.cache_chunk(chunk, tenant="default") for chunk in chunks]:
        future.result(timeout=60)
    for chunk in chunks:
        key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        alone = true_kv(family, chunk.prefix, chunk.tokens)
        behind = true_kv(family, (*chunk.prefix, *unrelated), chunk.tokens)
        moved = np.zeros(len(chunk))
        for one, other in zip(alone, behind, strict=True):
            moved += (
                np.sqrt(((one - other) ** 2).sum((0, 2))) / np.sqrt((one**2).sum((0, 2))).mean()
            )
        found = made.store.get(key).scores.sensitivity
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, 2 * moved / len(alone), rtol=1e-3, atol=1e-5)
        assert found.min() > 0


def true_kv(family, before, tokens):
    """Keys without rotary embedding and values [kv_heads, tokens, dim] of all layers, computed
    behind other tokens."""
    prompt = Prompt((FreshSegment(before), CachedSegment(Chunk(tokens))))
    (kv,) = true_chunk_kv(loaded_model(family), prompt, ["a"])
    return [heads.numpy() for layer in kv.layers for heads in (layer.key, layer.value)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("step", [7, 33, 512])
def test_chunks_behind_each_other(family, step):
    """The first chunk ends before the window of the last ones' tokens, which therefore see nothing
    of it."""
    prompt = linked_prompt(23, 1, 70, 31, header=6, middle=2)
    names = ["first", "second", "third", "fourth"]
    spans = [(span.start, span.end) for span in prompt.spans]
    attention = chunk_attention(reference_model(family), prompt.tokens.tolist())
    computed = true_chunk_kv(loaded_model(family), prompt, names, step)
    for index, kv in enumerate(computed):
        check(kv.scores, attention, spans, index, names)
    if family == "mistral-window":
        assert computed[3].scores.contextualization.context[0].attention == 0


def test_sinks_take_attention_away():
    """With sinks, a token's attention on all tokens that it sees is less than 1, and the scores
    show it."""
    prompt = linked_prompt(30, 18)
    with_sinks, without = (
        sum(true_chunk_kv(loaded_model(family), prompt, ["a", "b"])[0].scores.received)
        for family in ("gpt_oss-sinks", "mixtral-moe")
    )
    assert with_sinks < 29.5
    np.testing.assert_allclose(without, 30, rtol=1e-5)


def test_an_engine_that_collects_no_scores_stores_none(bench):
    made = bench(chunk_scores=False)
    prompt = linked_prompt(20, 15)
    made.cache(prompt)
    for chunk in prompt.chunks:
        key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        assert made.store.get(key).scores is None
    for policy, selected in (("h2o-20", 3), ("cachecraft-1", 8)):  # the first ones then
        (layers,) = made.explain(prompt, policy).layers
        assert layers.recomputed == ((20, 20 + selected),)


@pytest.mark.parametrize("how", ["linked", "loaded and linked", "created"])
def test_scores_come_later_where_they_are_needed(bench, tmp_path, how):
    """Texts that nobody named are computed without scores while an answer waits; a policy that
    needs them, or a context cache of the text, has them computed again."""
    made = bench(slower=lambda events: [DiskTier(tmp_path / "chunks", 1 << 28, events)])
    (disk,) = made.slower
    named = linked_prompt(20, 15)
    unnamed = named.with_chunks(replace(chunk, scored=False) for chunk in named.chunks)
    keys = [
        chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        for chunk in named.chunks
    ]

    def scores():
        made.store.flush()
        return [tier.get(key).scores for tier in (made.store, disk) for key in keys]

    expected = made.answer(unnamed, "naive").tokens
    assert scores() == [None] * 4
    assert made.answer(named, "naive").finished.usage.cached_tokens == 35
    assert scores() == [None] * 4, "this policy does not need any"
    if how == "loaded and linked":
        forget_host(made)
    if how == "created":
        made.cache(named)
    else:
        assert made.answer(unnamed, "h2o-20").finished.usage.cached_tokens == 0
        assert made.answer(unnamed, "h2o-20").finished.usage.cached_tokens == 32
    assert None not in scores()
    assert made.answer(named, "naive").tokens == expected


def test_a_prompt_is_cached_as_it_stands(bench):
    """Its chunks' KV and scores are what one full prefill gives, and are exact wherever the same
    stands before them."""
    made = bench("llama", max_step_tokens=17)
    prompt = linked_prompt(23, 1, 40, header=6, middle=2)
    known = made.engine.cache_prompt(prompt, tenant="default").result(timeout=60)
    assert known.tokens.tolist() == prompt.tokens.tolist()
    assert all(span.exact for span in known.spans)
    for chunk, true in zip(
        known.chunks, true_chunk_kv(made.loaded, prompt, prompt.contents), strict=True
    ):
        kv = made.store.get(chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default"))
        for ours, expected in zip(
            kv.layers, changed(true, made.loaded.resident_form.resident).layers, strict=True
        ):
            np.testing.assert_allclose(ours.key, expected.key, atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(ours.value, expected.value, atol=1e-5, rtol=1e-5)
        assert_close(kv.scores.inter, true.scores.inter)
        assert [c.content for c in kv.scores.contextualization.context] == [
            c.content for c in true.scores.contextualization.context
        ]
    fresh_only = linked_prompt(header=6)
    assert made.engine.cache_prompt(fresh_only, tenant="default").result(timeout=60) == fresh_only
