"""Policies against slow references, written from the papers' formulas over whole attention
matrices: which tokens are computed in which layer, the figures that decided it, and what the model
then answers."""

from dataclasses import replace
from functools import partial
from math import ceil, exp

import numpy as np
import pytest
import torch

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.linking import parse_policy
from kvlinker.linking.policies.cacheblend import CacheBlend
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt, Segment
from tests.engines.embedded.conftest import as_policy, linked_prompt, random_tokens
from tests.engines.embedded.execution.test_oracle import TOLERANCE, computed_layers, true_chunk_kv
from tests.engines.embedded.reference import Reference, chunk_attention, forward
from tests.linking.test_reuse import entropy_growth, kendall

MODELS = {
    "llama": {"num_hidden_layers": 6},
    "gemma3": {},
    "gemma2-softcap": {"num_hidden_layers": 4},
    "gpt_oss-sinks": {"num_hidden_layers": 5},
    "mixtral-moe": {"num_hidden_layers": 4},
    "gpt_neox-partial": {"num_hidden_layers": 5},
    "cohere2-interleaved-nope": {},
    "gemma3n-shared": {},
    "gemma4-shared-two-sizes": {},
    "deepseek_v3-latents-interleaved": {"num_hidden_layers": 5},
    "longcat-latents-interleaved": {"num_layers": 3, "num_hidden_layers": 6},
}
PROMPTS = {
    "header and fresh text between": linked_prompt(31, 57, 19, 40, header=5, middle=3),
    "long question": linked_prompt(40, 1, 33, fresh=71, seed=1),
    "ends in a chunk": linked_prompt(23, 30, 18, fresh=0, header=2, seed=2),
}
STEPS = 3


QUICK_MODELS = ("llama",)


@pytest.fixture
def bench(bench):
    """Makes engines that reuse what requests computed."""
    return partial(bench, prefix_cache="on")


@pytest.fixture(
    params=[
        pytest.param(name, marks=() if name in QUICK_MODELS else pytest.mark.matrix)
        for name in MODELS
    ]
)
def model(request):
    return request.param, MODELS[request.param]


def top(values, count, among):
    """The ``count`` highest of ``values`` where ``among`` is true, as a mask."""
    order = sorted(np.flatnonzero(among), key=lambda position: (-values[position], position))
    mask = np.zeros(len(among), dtype=bool)
    mask[order[:count]] = True
    return mask


def check(made, reference, policy, selected, tenant="default"):
    """``policy`` on the reference's prompt computes ``selected`` (masks by layer, the last one for
    all that follow), and answers as the reference does, also when it reuses that answer's KV. (Of a
    prompt that ends in a chunk, that one is linked anew then, by a share of its own.) Returns the
    explanation."""
    prompt = reference.prompt
    explanation = made.explain(prompt, policy, tenant)
    outcome, again = made.answer_twice(prompt, policy, tenant=tenant, max_tokens=STEPS)
    expected = np.array([*selected, *[selected[-1]] * (reference.layers - len(selected))])
    if reference.cached[-1]:
        expected[:, -1] = True
    np.testing.assert_array_equal(computed_layers(explanation, reference.layers), expected)
    tokens, logprobs = reference.answer(
        [*selected, *[selected[-1]] * (reference.layers - len(selected))], STEPS
    )
    same_share = not reference.cached[-1] or not as_policy(policy).needs.question_attention
    for answer in (outcome, again) if same_share else (outcome,):
        assert answer.failed is None, answer.failed
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=TOLERANCE)
    assert outcome.finished.usage.recomputed_tokens == round(expected.sum() / reference.layers)
    return explanation


def score(explanation, name, layer=None):
    (found,) = [found for found in explanation.scores if (found.name, found.layer) == (name, layer)]
    return found


# Static selections, over KV that is not exact.


@pytest.mark.parametrize("shape", ["header and fresh text between", "ends in a chunk"])
def test_static_policies(bench, model, shape):
    family, changes = model
    prompt = PROMPTS[shape]
    made = bench(family, changes, max_step_tokens=29)
    reference = Reference(prompt, family, **changes)
    nothing = np.zeros(len(prompt), dtype=bool)
    first, around = nothing.copy(), nothing.copy()
    for span in prompt.spans:
        first[span.start : min(span.start + 4, span.end)] = True
        around[span.start : min(span.start + 3, span.end)] = True
    for span in prompt.spans[:-1]:
        around[max(span.end - 2, span.start) : span.end] = True
    check(made, reference, "naive", [nothing])
    check(made, reference, "legolink-4", [first & reference.inexact])
    check(made, reference, "attnlink-5", [around & reference.inexact])
    stale = Reference(prompt, family, positioned=False, **changes)
    check(made, stale, "naive-unpositioned", [nothing])


# CacheBlend, section 4.3.


def blended(reference, percent, *, onestep=False, parts="kv", spread=25, also=False):
    """Gradual filtering: layer 0 computes all; r₁ > r₂ > … percent of the tokens stay from layer 1
    on, so that r is the average over all layers, but they half of it at least; those with the
    highest deviation among those that are left. ``also`` are computed whatever happens."""
    behind = max(percent / 2, (percent * reference.layers - 100) / (reference.layers - 1))
    more = min(behind * spread / 100, 100 - behind)
    shares = np.linspace(behind + more, behind - more, reference.layers - 1)
    own, masks = reference.inexact, [reference.inexact]
    for layer in range(1, reference.asked):
        if onestep and layer > 1:
            break
        deviation = reference.deviation(masks, layer, parts)
        share = behind if onestep else shares[layer - 1]
        own = top(deviation, ceil(round(share * reference.inexact.sum() / 100, 6)), among=own)
        masks.append(own | also)
    return masks


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_cacheblend(bench, model, prompt):
    family, changes = model
    made = bench(family, changes, max_step_tokens=29)
    reference = Reference(prompt, family, **changes)
    masks = blended(reference, 30)
    explanation = check(made, reference, "cacheblend-30", masks)
    counts = [mask.sum() for mask in masks]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[1] < counts[0]
    for layer in range(1, reference.asked):
        active = masks[layer - 1]
        for name, part in (("key_deviation", "k"), ("value_deviation", "v")):
            shown = score(explanation, name, layer)
            assert shown.positions.tolist() == np.flatnonzero(active).tolist()
            expected = reference.deviation(masks[:layer], layer, part)[active]
            np.testing.assert_allclose(shown.values, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cacheblend-20-onestep", {"onestep": True}),
        ("cacheblend-20-onestep-v", {"onestep": True, "parts": "v"}),
        ("cacheblend-20-k", {"parts": "k"}),
        ("cacheblend-20-v-d100", {"parts": "v", "spread": 100}),
        ("cacheblend-20-d0", {"spread": 0}),
        ("cacheblend-90-d50", {"spread": 50}),
    ],
)
def test_variants_of_cacheblend(bench, name, options):
    prompt = PROMPTS["header and fresh text between"]
    reference = Reference(prompt, **MODELS["llama"])
    percent = 90 if "90" in name else 20
    check(bench("llama", MODELS["llama"]), reference, name, blended(reference, percent, **options))


def test_parts_of_the_kv_deviate_differently():
    """Else the test above could not tell them apart."""
    reference = Reference(PROMPTS["header and fresh text between"], **MODELS["llama"])
    found = [
        np.packbits(blended(reference, 20, onestep=True, parts=parts)[-1]).tolist()
        for parts in ("k", "v", "kv")
    ]
    assert found[0] != found[1] != found[2] != found[0]


def cacheblend(name: str) -> CacheBlend:
    """Return the policy of this name, which is one of CacheBlend's."""
    policy = parse_policy(name)
    assert isinstance(policy, CacheBlend)
    return policy


def test_cacheblend_on_average_computes_its_percentage():
    """Layer 0, which computes all, included: in models with enough layers."""
    for spread in (0, 25, 100):
        for percent, layers in ((15, 24), (15, 32), (30, 6), (50, 3), (100, 2)):
            policy = cacheblend(f"cacheblend-{percent}-d{spread}")
            shares = [policy.kept_percent(layer, layers) for layer in range(1, layers)]
            assert np.mean([100, *shares]) == pytest.approx(percent)
            assert shares == sorted(shares, reverse=True)
            assert 0 <= shares[-1] <= shares[0] <= 100
            np.testing.assert_allclose(np.diff(shares, n=2), 0, atol=1e-9)  # equal steps
    assert cacheblend("cacheblend-15-d0").kept_percent(3, 6) == 7.5  # too few layers
    assert cacheblend("cacheblend-15").kept_percent(1, 1) == 15


# query: the tokens that the prompt's last token attends to most.


def probed(reference):
    """The last token's attention, mean over layers and heads, after a pass of the fresh tokens over
    the placed KV."""
    first = reference.run([np.zeros(len(reference.prompt), dtype=bool)])
    return np.mean([weights[:, -1].double().mean(0).numpy() for weights in first.attention], axis=0)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_query(bench, model, prompt):
    family, changes = model
    made = bench(family, changes, max_step_tokens=29)
    reference = Reference(prompt, family, **changes)
    attention = probed(reference)
    for percent in (3, 40):
        selected = top(
            attention, ceil(percent * reference.inexact.sum() / 100), among=reference.inexact
        )
        explanation = check(made, reference, f"query-{percent}", [selected])
        shown = score(explanation, "question_attention")
        assert shown.positions.tolist() == np.flatnonzero(reference.inexact).tolist()
        np.testing.assert_allclose(shown.values, attention[reference.inexact], rtol=1e-4, atol=1e-7)


def test_query_weighted_by_sensitivity(bench, model):
    """A chunk that nothing was measured of when it was created weighs as the others do on
    average."""
    family, changes = model
    made = bench(family, changes, max_step_tokens=29)
    prompt = PROMPTS["header and fresh text between"]
    found = np.full(len(prompt), np.nan)
    for index, (chunk, span) in enumerate(zip(prompt.chunks, prompt.spans, strict=True)):
        made.engine.cache_chunk(replace(chunk, scored=index != 2), tenant="default").result(
            timeout=60
        )
        scores = made.store.get(
            chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        ).scores
        if scores is not None:
            found[span.start : span.end] = scores.sensitivity
    assert np.isnan(found).sum() == len(prompt) - len(prompt.tokens[prompt.cached]) + len(
        prompt.chunks[2]
    )
    reference = Reference(prompt, family, **changes)
    weights = probed(reference) * np.where(np.isnan(found), np.nanmean(found), found)
    selected = top(weights, ceil(0.2 * reference.inexact.sum()), among=reference.inexact)
    explanation = check(made, reference, "query-20-sensitive", [selected])
    shown = score(explanation, "sensitivity")
    assert shown.positions.tolist() == np.flatnonzero(~np.isnan(found) & reference.inexact).tolist()
    np.testing.assert_allclose(shown.values, found[shown.positions])


# H2O: the tokens that the chunk itself attends to most.


def test_h2o(bench, model):
    family, changes = model
    prompt = PROMPTS["header and fresh text between"]
    reference = Reference(prompt, family, **changes)
    selected = np.zeros(len(prompt), dtype=bool)
    for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
        received = chunk_attention(reference.model, chunk.tokens).sum(0)
        mine = slice(span.start, span.end)
        selected[mine] = top(
            received, ceil(0.3 * len(chunk)), among=np.ones(len(chunk), dtype=bool)
        )
    check(bench(family, changes), reference, "h2o-30", [selected])


# Cache-Craft, sections 3.1 and 3.2.


def old_and_new(made, header, order=(0, 1, 2, 3)):
    """A prompt whose chunks' KV and scores come from another prompt, where they stood in another
    order with one more between them. Returns both; with the default ``order`` of the new one, both
    begin with the same chunk."""
    first, second, third, fourth, other = (
        Chunk(random_tokens(n, [7, n])) for n in (14, 33, 26, 21, 17)
    )
    head = FreshSegment(random_tokens(header, 8))
    old = Prompt(
        (
            head,
            *map(CachedSegment, (first, third, other, second, fourth)),
            FreshSegment(random_tokens(2, 9)),
        )
    )
    variants = {}
    for index, kv in enumerate(true_chunk_kv(made.loaded, old, old.contents)):
        variant = Chunk(old.chunks[index].tokens, tuple(old.tokens_before(index)))
        variants[variant.content] = variant
        made.store.put(
            chunk_key(variant, fingerprint=made.loaded.fingerprint, tenant="default"), kv
        )
    new = [variants[(first, second, third, fourth)[index].content] for index in order]
    between = FreshSegment(random_tokens(3, 10))
    question = FreshSegment(random_tokens(12, 11))
    return old, Prompt(
        (head, *map(CachedSegment, new[:2]), between, *map(CachedSegment, new[2:]), question)
    )


def overhead(model, old, index, before, alpha):
    """Equations 3 to 12 for the chunk at ``index`` of the prompt ``old`` behind the chunks
    ``before``, and its tokens' attention on all chunks before it."""
    layers = [
        weights.double().mean(0).numpy()
        for weights in forward(model, old.tokens.tolist()).attention
    ]
    mine = slice(old.spans[index].start, old.spans[index].end)
    earlier = [slice(span.start, span.end) for span in old.spans[:index]]
    size = old.spans[index].length
    outside = [sum(a[mine, j].sum() / (size * (j.stop - j.start)) for j in earlier) for a in layers]
    inside = [np.tril(a[mine, mine], -1).sum() / size**2 for a in layers]
    inter = [np.mean([a[mine, j].sum() for a in layers]) for j in earlier]
    impact = 1 / (1 + exp(-np.mean(outside) / np.mean(inside)))
    names = list(old.contents[:index])
    if inter:
        overlap = sum(
            value for value, name in zip(inter, names, strict=True) if name in before
        ) / sum(inter)
    else:
        overlap = 0.0 if before else 1.0
    adjusted = overlap * (1 - kendall(names, list(before)))
    looked = np.mean(
        [
            a[mine, earlier[0].start : mine.start].sum(1) if earlier else np.zeros(size)
            for a in layers
        ],
        0,
    )
    return min(1.0, alpha * impact * (1 - adjusted)), looked


def crafted(reference, old, alpha):
    """The selection, and every chunk's CFO."""
    prompt = reference.prompt
    selected = np.zeros(len(prompt), dtype=bool)
    overheads = []
    for index, (content, span) in enumerate(zip(prompt.contents, prompt.spans, strict=True)):
        before = prompt.contents[:index]
        found, looked = overhead(reference.model, old, old.contents.index(content), before, alpha)
        overheads.append(0.0 if not reference.inexact[span.start] else found)
        count = ceil(overheads[-1] * span.length)
        selected[span.start : span.end] = top(looked, count, among=np.ones(span.length, dtype=bool))
    return selected, overheads


def focused(reference, selected, window, also=False):
    """Algorithm 1: masks by layer. The question is what stands behind the last chunk, or the last
    token. ``also`` are computed whatever happens."""
    spans = reference.prompt.spans
    question = min(spans[-1].end, len(reference.prompt) - 1)
    total = np.zeros(len(spans))
    masks, history = [selected | also], []
    for layer in range(reference.asked - 1):
        attention = reference.run(masks).attention[layer].double().mean(0).numpy()
        total += [attention[question:, span.start : span.end].sum() for span in spans]
        growth = entropy_growth(total.tolist())
        size = growth.index(max(growth)) + 1
        history.append(set(sorted(range(len(spans)), key=lambda chunk: -total[chunk])[:size]))
        masks.append(masks[-1])
        if len(history) >= window and all(focus == history[-1] for focus in history[-window:]):
            masks[-1] = selected.copy()
            for chunk in set(range(len(spans))) - history[-1]:
                masks[-1][spans[chunk].start : spans[chunk].end] = False
            masks[-1] |= also
            break
    return masks


@pytest.mark.parametrize(
    ("header", "order"), [(0, (0, 1, 2, 3)), (4, (0, 1, 2, 3)), (4, (3, 1, 0, 2))]
)
def test_cachecraft(bench, model, header, order):
    family, changes = model
    made = bench(family, changes)
    old, new = old_and_new(made, header, order)
    assert [span.exact for span in new.spans] == [order[0] == 0, False, False, False]
    reference = Reference(new, family, **changes)
    for alpha in (0.4, 2.5):
        selected, overheads = crafted(reference, old, alpha)
        explanation = check(made, reference, f"cachecraft-{alpha:g}", [selected])
        np.testing.assert_allclose(score(explanation, "cfo").values, overheads, rtol=1e-4)
    if order[0] == 0:
        assert score(explanation, "gamma").values[3] == pytest.approx(
            1 / 3
        )  # old order 0 2 1, new order 0 1 2
    else:
        assert overheads[0] > 0.1  # it was computed behind all others, and stands behind none


@pytest.mark.parametrize(
    ("window", "order"), [(1, (0, 1, 2, 3)), (2, (0, 1, 2, 3)), (1, (3, 2, 0, 1))]
)
def test_cachecraft_with_focus(bench, model, window, order):
    family, changes = model
    made = bench(family, changes, max_step_tokens=29)
    old, new = old_and_new(made, header=4, order=order)
    reference = Reference(new, family, **changes)
    selected, _ = crafted(reference, old, 1.5)
    masks = focused(reference, selected, window)
    check(made, reference, f"cachecraft-1.5-focus-w{window}", masks)
    if window == 1:
        assert masks[-1].sum() < selected.sum()  # else nothing was dropped, and nothing tested


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_the_focus_of_several_questions(bench, model, prompt):
    family, changes = model
    made = bench(family, changes)
    reference = Reference(prompt, family, **changes)
    selected = np.zeros(len(prompt), dtype=bool)
    for span in prompt.spans[
        1:
    ]:  # computed alone: CCI is 0.5 and β is 0, but for a chunk that none stands before
        selected[span.start : span.start + ceil(0.8 * 0.5 * span.length)] = True
    masks = focused(reference, selected, 1)
    explanation = check(made, reference, "cachecraft-0.8-focus-w1", masks)
    question = min(prompt.spans[-1].end, len(prompt) - 1)
    attention = reference.run(masks).attention
    shown = [found for found in explanation.scores if found.name == "chunk_attention"]
    dropped = masks[-1].sum() < masks[0].sum()
    assert [found.layer for found in shown] == list(range(1 if dropped else reference.asked - 1))
    for found in shown:
        by_chunk = [
            attention[found.layer][:, question:, s.start : s.end].mean(0).sum()
            for s in prompt.spans
        ]
        np.testing.assert_allclose(found.values, torch.stack(by_chunk), rtol=1e-4, atol=1e-6)


# Unions.


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("joined", ["query-10+cacheblend-20", "cacheblend-20+query-10"])
def test_query_joined_with_cacheblend(bench, prompt, joined):
    """The second pass filters, over KV that is placed as it was stored; what query wants stays."""
    reference = Reference(prompt, **MODELS["llama"])
    attention = probed(reference)
    wanted = top(attention, ceil(reference.inexact.sum() / 10), among=reference.inexact)
    masks = blended(reference, 20, also=wanted)
    explanation = check(
        bench("llama", MODELS["llama"], max_step_tokens=29), reference, joined, masks
    )
    np.testing.assert_allclose(
        score(explanation, "question_attention").values,
        attention[reference.inexact],
        rtol=1e-4,
        atol=1e-7,
    )
    expected = reference.deviation(masks[:1], 1, "v")[reference.inexact]
    np.testing.assert_allclose(
        score(explanation, "value_deviation", 1).values, expected, rtol=1e-3, atol=1e-6
    )


def test_cacheblend_joined_with_a_static_policy(bench, model):
    family, changes = model
    prompt = PROMPTS["header and fresh text between"]
    reference = Reference(prompt, family, **changes)
    first = np.zeros(len(prompt), dtype=bool)
    for span in prompt.spans:
        first[span.start : span.start + 6] = True
    masks = blended(reference, 20, also=first)
    check(bench(family, changes), reference, "cacheblend-20+legolink-6", masks)


@pytest.mark.parametrize(
    "joined", ["query-10+cachecraft-1.5-focus-w1", "cachecraft-1.5-focus-w1+query-10"]
)
def test_query_joined_with_a_focus(bench, joined):
    """Tokens that query wants stay, though the question does not focus on their chunk."""
    made = bench("llama", MODELS["llama"])
    old, new = old_and_new(made, header=4)
    reference = Reference(new, **MODELS["llama"])
    wanted = top(probed(reference), ceil(reference.inexact.sum() / 10), among=reference.inexact)
    selected, _ = crafted(reference, old, 1.5)
    masks = focused(reference, selected, 1, also=wanted)
    assert masks[-1].sum() < (selected | wanted).sum()
    check(made, reference, joined, masks)


# Prompts of any shape.


def any_prompt(random):
    """Chunks that were computed alone, behind the prompt's own start, or behind something else, one
    of them twice."""
    chunks = []
    segments: list[Segment] = [FreshSegment(random_tokens(int(random.integers(0, 5)), random))]
    for _ in range(random.integers(1, 6)):
        prompt = Prompt(tuple(segments))
        tokens = random_tokens(int(random.integers(1, 40)), random)
        prefix = [
            (),
            tuple(prompt.tokens.tolist()),
            random_tokens(int(random.integers(1, 9)), random),
        ]
        chunks.append(Chunk(tokens, prefix[random.integers(0, 3)]))
        segments.append(CachedSegment(chunks[random.integers(0, len(chunks))]))
        segments.append(FreshSegment(random_tokens(int(random.integers(0, 4)), random)))
    return Prompt(
        (*segments, FreshSegment(random_tokens(int(random.choice([0, 1, 10, 70])), random)))
    )


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed < 3 else pytest.mark.matrix) for seed in range(20)],
)
def test_prompts_of_any_shape(bench, seed):
    random = np.random.default_rng(seed)
    family = list(MODELS)[seed % len(MODELS)]
    changes = MODELS[family]
    made = bench(family, changes, max_step_tokens=int(random.choice([5, 40, 500])))
    prompt = any_prompt(random)
    reference = Reference(prompt, family, **changes)
    percent = float(random.choice([1, 12.5, 50, 99]))
    wanted = top(
        probed(reference), ceil(percent * reference.inexact.sum() / 100), among=reference.inexact
    )
    for policy, masks in (
        (f"query-{percent:g}", [wanted]),
        (f"cacheblend-{percent:g}", blended(reference, percent)),
        (f"cacheblend-{percent:g}-onestep-k", blended(reference, percent, onestep=True, parts="k")),
        (f"cacheblend-{percent:g}+query-{percent:g}", blended(reference, percent, also=wanted)),
    ):
        made.cache(prompt, tenant=policy)
        check(
            made, reference, policy, masks, tenant=policy
        )  # what one computed in full would serve the others
