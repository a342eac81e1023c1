"""The strong oracle: with chunk KV taken from the prompt's own full forward pass, and garbage
wherever a policy recomputes, every policy must give exactly what the model gives; and so again when
it reuses what it computed then."""

import numpy as np
import pytest
import torch

from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.contract.observation import ScoreCollector
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, VisibleKV
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.linking import Evidence, Needs, Policy, make_plan, parse_policy
from kvlinker.linking.policy import Union
from kvlinker.store import ChunkKV, HostTier, LayerKV
from tests.engines.embedded.conftest import full_forward, linked_prompt
from tests.toy_models import FAMILIES

POLICIES = [
    "full",
    "naive",
    "prefix",
    "legolink-1",
    "legolink-16",
    "attnlink-9",
    "random-40",
    "random-100",
]
EVIDENCE_DRIVEN = [
    "h2o-30",
    "cachecraft-0.7",
    "cachecraft-1-focus-w1",
    "cacheblend-20",
    "cacheblend-20-onestep-v",
    "cacheblend-20-k-d100",
    "h2o-10+random-10",
    "h2o-10+cachecraft-0.5-focus-w1",
]
STEPS = 4
TOLERANCE = 2e-5


def true_chunk_kv(loaded, prompt, names=None, step=10**6):
    """Each chunk's KV as the full forward pass of this very prompt makes it, ``step`` tokens at a
    time. With ``names`` of the chunks, their scores are collected too."""
    spans = [(span.start, span.end) for span in prompt.spans]
    scores = None if names is None else ScoreCollector(len(loaded.layers), spans, names)
    capture = Capture(loaded.anatomy, spans, dtype=loaded.dtype, scores=scores)
    pool = KVPool(loaded.layers, len(prompt), dtype=loaded.dtype, device=loaded.device)
    runner = Runner(loaded.model, loaded.anatomy, pool)
    for begin in range(0, len(prompt), step):
        tokens = prompt.tokens[begin : begin + step]
        run = Run(
            np.arange(begin, begin + len(tokens)), begin, tokens, capture=capture, observer=scores
        )
        runner.step(Batch((run,), {None: own_sight(begin + len(tokens))}))
    return capture.finish()


def own_sight(length):
    """What a sequence sees that has computed so many tokens itself, into the pool's first slots."""
    positions = np.arange(length)
    return VisibleKV((), (SlotSpan(0, len(positions)),), positions, OwnTokens(positions, ()))


def computed_layers(explanation, layers):
    """The cached tokens that each layer computes, [layers, tokens]."""
    masks = np.zeros((layers, explanation.tokens), dtype=bool)
    assert [entry.first for entry in explanation.layers] == [
        0,
        *[entry.last + 1 for entry in explanation.layers[:-1]],
    ]
    assert explanation.layers[-1].last == layers - 1
    for entry in explanation.layers:
        for begin, end in entry.recomputed:
            masks[entry.first : entry.last + 1, begin:end] = True
    return masks


def with_garbage(kv, positions):
    """The KV with garbage at the given tokens of the chunk."""

    def spoiled(tensor):
        spoiled = tensor.clone()
        spoiled[:, positions] = 77.0
        return spoiled

    return ChunkKV(
        tuple(LayerKV(spoiled(layer.key), spoiled(layer.value)) for layer in kv.layers), kv.scores
    )


def strangers(prompt):
    """Names by which scores tell of others: then no chunk counts as computed behind what it stands
    behind."""
    return [f"stranger {index}" for index in range(len(prompt.chunks))]


def plant(bench, prompt, policy, tenant, names=None):
    """Store the true KV under the chunks' keys, garbage at what the policy recomputes; with
    ``names``, with scores."""
    selected = parse_policy(policy).select(prompt, Evidence())
    chunks_kv = true_chunk_kv(bench.loaded, prompt, names)
    for chunk, span, kv in zip(prompt.chunks, prompt.spans, chunks_kv, strict=True):
        positions = np.flatnonzero(selected[span.start : span.end]).tolist()
        key = chunk_key(chunk, fingerprint=bench.loaded.fingerprint, tenant=tenant)
        bench.store.put(key, with_garbage(kv, positions))


def plant_layer_by_layer(bench, prompt, policy):
    """The same by what the engine says that it computes in each layer. Returns the tenant."""
    chunks_kv = true_chunk_kv(bench.loaded, prompt, strangers(prompt))

    def put(tenant, kvs):
        for chunk, kv in zip(prompt.chunks, kvs, strict=True):
            bench.store.put(
                chunk_key(chunk, fingerprint=bench.loaded.fingerprint, tenant=tenant), kv
            )

    put(f"true {policy}", chunks_kv)
    masks = computed_layers(
        bench.explain(prompt, policy, tenant=f"true {policy}"), len(bench.loaded.layers)
    )
    kept = [
        mask for mask, layer in zip(masks, bench.loaded.layers, strict=True) if layer.source is None
    ]
    spoiled = []
    for kv, span in zip(chunks_kv, prompt.spans, strict=True):
        layers = []
        for layer, mask in zip(kv.layers, kept, strict=True):
            alone = with_garbage(
                ChunkKV((layer,)), np.flatnonzero(mask[span.start : span.end]).tolist()
            )
            layers.append(alone.layers[0])
        spoiled.append(ChunkKV(tuple(layers), kv.scores))
    put(policy, spoiled)
    return policy


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_by_evidence_equal_the_full_forward_pass(bench, family):
    """Garbage wherever a layer computes, the true KV elsewhere. What decides is not touched by it:
    scores are stored, spoiled tokens deviate most, and the question's attention is the true one
    once they are repaired."""
    made = bench(family, max_step_tokens=37, kv_slots=8192, prefix_cache="on")
    prompt = linked_prompt(31, 57, 19, 64, header=5, middle=3)
    expected = full_forward(family, prompt, STEPS)
    for policy in EVIDENCE_DRIVEN:
        plant_layer_by_layer(made, prompt, policy)
    for _, usage in usages(made, prompt, EVIDENCE_DRIVEN, expected):
        assert usage.recomputed_tokens > 0
    for policy, usage in usages(made, prompt, EVIDENCE_DRIVEN, expected):
        refines = parse_policy(policy).needs.refines
        assert usage.exact_cached_tokens == (0 if refines else len(prompt) - 1), (
            "the header alone is too little"
        )


def usages(made, prompt, policies, expected):
    """Have answers under all policies, each its own tenant's, computed together; check them, and
    yield each with what it took."""
    tokens, logprobs = expected
    outcomes = [
        made.submit(prompt, policy, tenant=policy, max_tokens=STEPS)[0] for policy in policies
    ]
    for policy, outcome in zip(policies, outcomes, strict=True):
        outcome.wait()
        assert outcome.failed is None, outcome.failed
        assert outcome.tokens == tokens, policy
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE, err_msg=policy)
        yield policy, outcome.finished.usage


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gpt_neox-partial"]
)
@pytest.mark.parametrize(
    "policy", ["cacheblend-40", "cacheblend-40-onestep", "cacheblend-40-v", "cacheblend-40-k"]
)
@pytest.mark.parametrize("joined", ["", "+legolink-1"])
def test_cacheblend_finds_what_is_spoiled(bench, family, policy, joined):
    """Up to 15 percent in the last layer of the gradual schedule, of 171 tokens here."""
    made = bench(family)
    prompt = linked_prompt(31, 57, 19, 64, header=5, middle=3)
    tokens, logprobs = full_forward(family, prompt, 2)
    for chunk, kv in zip(prompt.chunks, true_chunk_kv(made.loaded, prompt), strict=True):
        key = chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        made.store.put(key, with_garbage(kv, [0, 3, 4, 11, 17, 18]))
    outcome = made.answer(prompt, policy + joined, max_tokens=2)
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


class Spoiling(Policy):
    """Another policy; when it has selected, garbage takes the place of all KV that is computed
    again, and of ``more`` tokens: of the first pass's own tokens, and of chunks. For a request that
    is alone in the engine."""

    family = "spoiling"

    inner: Policy
    pool: KVPool
    chunks: tuple
    more: tuple = ()

    needs = Needs(question_attention=True, scores=True)

    def select(self, prompt, evidence):
        selected = self.inner.select(prompt, evidence)
        for tensor in (*self.pool.keys, *self.pool.values):
            assert tensor.any(), "the first pass has not been here"
            tensor.fill_(77.0)
        spoiled = [*np.flatnonzero(selected), *self.more]
        for span, kv in zip(prompt.spans, self.chunks, strict=True):
            inside = [
                position - span.start for position in spoiled if span.start <= position < span.end
            ]
            for layer in kv.layers:
                with torch.inference_mode():  # in which kernels write resident keys
                    layer.key[:, inside] = layer.value[:, inside] = 77.0
        return selected


def answer_over_a_spoiled_pool(made, prompt, names, more=(), **sampling):
    pool = made.engine.runner.pool
    for tensor in (*pool.keys, *pool.values):
        tensor.zero_()
    plant(made, prompt, "naive", tenant="default", names=strangers(prompt))
    keys = [
        chunk_key(chunk, fingerprint=made.loaded.fingerprint, tenant="default")
        for chunk in prompt.chunks
    ]
    chunks = tuple(made.store.get(key) for key in keys)
    parts = tuple(Spoiling(parse_policy(name), pool, chunks, more) for name in names)
    policy = parts[0] if len(parts) == 1 else Union(parts)
    for outcome in made.answer_twice(prompt, policy, **{"max_tokens": 2} | sampling):
        assert outcome.failed is None, outcome.failed
        yield outcome


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gpt_neox-partial"]
)
@pytest.mark.parametrize(
    "names", [["query-20"], ["query-0"], ["query-5", "legolink-4"], ["h2o-10", "query-10"]]
)
@pytest.mark.parametrize("fresh", [11, 0])
def test_the_second_pass_repairs_all_that_was_selected(bench, family, names, fresh):
    prompt = linked_prompt(31, 57, 19, header=5, middle=3, fresh=fresh)
    tokens, logprobs = full_forward(family, prompt, 2)
    made = bench(family, max_step_tokens=37, kv_slots=1024, prefix_cache="on")
    for outcome in answer_over_a_spoiled_pool(made, prompt, names):
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


def test_what_the_second_pass_does_not_repair_shows(bench):
    prompt = linked_prompt(31, 57, 19, header=5)
    _, logprobs = full_forward("llama", prompt, 1)
    made = bench(kv_slots=1024, prefix_cache="on")
    for outcome in answer_over_a_spoiled_pool(made, prompt, ["query-0"], more=(6,)):
        assert abs(outcome.logprobs[0] - logprobs[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_equals_the_full_forward_pass(bench, family):
    made = bench(family, max_step_tokens=37, kv_slots=8192, prefix_cache="on")
    prompt = linked_prompt(31, 57, 19, 64, header=5, middle=3)
    expected = full_forward(family, prompt, STEPS)
    for policy in POLICIES:
        plant(made, prompt, policy, tenant=policy)
    for policy, usage in usages(made, prompt, POLICIES, expected):
        plan = make_plan(prompt, parse_policy(policy), Evidence())
        assert usage.recomputed_tokens == plan.recomputed_tokens
        assert usage.prompt_tokens == len(prompt)
    for _, usage in usages(made, prompt, POLICIES, expected):
        assert (usage.exact_cached_tokens, usage.fresh_tokens) == (len(prompt) - 1, 1)


@pytest.mark.parametrize("family", ["dynamic-rope", "longrope"])
def test_rotary_embeddings_that_depend_on_length_are_exact_up_to_the_window(bench, family):
    """Their tables change once more positions are asked for than the model was pretrained with: 256
    here."""
    made = bench(family, max_step_tokens=37, prefix_cache="on")
    assert made.engine.max_model_len == 256
    prompt = linked_prompt(80, 90, 71, fresh=11)
    tokens, logprobs = full_forward(family, prompt, 4)
    for policy in ("full", "legolink-3", "naive"):
        plant(made, prompt, policy, tenant=policy)
        for outcome in made.answer_twice(prompt, policy, tenant=policy, max_tokens=4):
            assert outcome.tokens == tokens
            np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


def test_queries_that_would_be_scaled_further_on_are_not_by_their_place_in_a_step(bench):
    """A step with more tokens than ``floor_scale``: transformers scales by rows, not positions."""
    made = bench("llama4-interleaved-nope", max_step_tokens=2048)
    prompts = [linked_prompt(100, 90, fresh=40, seed=seed) for seed in range(3)]
    assert sum(map(len, prompts)) > 300 > made.engine.max_model_len == 256
    expected = [full_forward("llama4-interleaved-nope", prompt, 2) for prompt in prompts]
    with made.held():
        outcomes = [made.submit(prompt, "full", max_tokens=2)[0] for prompt in prompts]
    for outcome, (tokens, logprobs) in zip(outcomes, expected, strict=True):
        assert outcome.wait().tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lengths", [(1,), (1, 1), (30, 1), (31, 40)])
def test_a_prompt_may_end_in_a_chunk(bench, policy, lengths):
    made = bench(prefix_cache="on")
    prompt = linked_prompt(*lengths, fresh=0, header=2)
    tokens, logprobs = full_forward("llama", prompt, STEPS)
    plant(made, prompt, policy, tenant="default")
    for outcome in made.answer_twice(prompt, policy, max_tokens=STEPS):
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss-sinks"])
def test_garbage_that_is_not_recomputed_shows(bench, family):
    """The oracle can fail: spoil one token that naive keeps, and the answer's probabilities
    move."""
    made = bench(family, prefix_cache="on")
    prompt = linked_prompt(31, 40)
    _, logprobs = full_forward(family, prompt, 1)
    plant(made, prompt, "legolink-1", tenant="default")
    for outcome in made.answer_twice(prompt, "naive", max_tokens=1):
        assert abs(outcome.logprobs[0] - logprobs[0]) > 100 * TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_first_chunk_alone_is_prefix_caching(bench, family):
    """R = ∅ with one chunk at position 0 must equal prefix caching, here with KV that kvlinker made
    itself."""
    made = bench(family, prefix_cache="on")
    prompt = linked_prompt(61)
    made.cache(prompt)
    tokens, logprobs = full_forward(family, prompt, STEPS)
    cold, warm = made.answer_twice(prompt, "naive", max_tokens=STEPS)
    for outcome in (cold, warm):
        assert outcome.tokens == tokens
        np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
    assert cold.finished.usage.cached_tokens == 61


def test_unpositioned_keys_differ_from_positioned_ones(bench):
    made = bench()
    prompt = linked_prompt(31, 40)
    made.cache(prompt)
    naive = made.answer(prompt, "naive")
    stale = made.answer(prompt, "naive-unpositioned")
    assert not np.allclose(naive.logprobs, stale.logprobs, atol=1e-4)


def test_stored_keys_carry_no_position(bench):
    """The same chunk behind something else: its first-layer keys differ between the places, its
    stored ones do not, and those in memory are at the positions 0, 1, …."""
    made = bench(slower=lambda events: [HostTier(1 << 28, events, name="slower")])
    prompt = linked_prompt(20, 20)
    made.cache(prompt)
    made.store.flush()
    key = chunk_key(prompt.chunks[0], fingerprint=made.loaded.fingerprint, tenant="default")
    moved = true_chunk_kv(made.loaded, linked_prompt(20, header=13))[0].layers[0]
    torch.testing.assert_close(made.slower[0].get(key).layers[0].key, moved.key)
    torch.testing.assert_close(
        made.store.get(key).layers[0].key, made.loaded.resident_form.resident(0, moved).key
    )
    assert (made.loaded.resident_form.resident(0, moved).key[:, 1:] != moved.key[:, 1:]).any()
