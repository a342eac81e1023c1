"""Models whose indexers pick the tokens that queries see: what the engine answers is what
transformers answers where the hidden states of kept tokens are those of the chunk alone, and the
choice is the model's own, of all that is linked."""

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.linking import Evidence, parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from tests.engines.embedded.conftest import EVERY_POLICY, linked_prompt, random_tokens
from tests.engines.embedded.execution.test_oracle import computed_layers
from tests.engines.embedded.frozen_reference import frozen_answer
from tests.toy_models import INDEXED, tiny_model
from tests.waiting import wait_until

TOLERANCE = 3e-5
PROMPT = linked_prompt(50, 36, 3, 90, 1, header=5, middle=2, fresh=9)
SHORT = linked_prompt(50, 41, header=5, middle=2, fresh=9)
TOKENS, BLOCKS, POOLS = "deepseek_v32-picks", "minimax_m3-blocks", "glm5_next-pools-states"
EACH = [
    pytest.param(family, marks=() if family in (TOKENS, POOLS) else pytest.mark.matrix)
    for family in (*INDEXED, POOLS)
]


class FirstOfEqual(TorchFunctionMode):
    """Of equal scores, the first are the highest: top-k leaves that open."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        scores, k = args
        indices = torch.argsort(scores, dim=-1, descending=True, stable=True)[..., :k]
        return torch.return_types.topk((scores.gather(-1, indices), indices))


def check(outcome, expected):
    tokens, logprobs = expected
    assert outcome.wait().failed is None
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


def frozen(family, prompt, policy, steps=3):
    """What a policy that looks at the prompt alone is to answer."""
    selected = np.ones(len(prompt), dtype=bool)
    if policy != "full":
        selected = parse_policy(policy).select(prompt, Evidence())
    with FirstOfEqual():
        return frozen_answer(family, prompt, [selected], steps)


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("step", [37, 2048])
def test_everything_computed_is_the_model(bench, family, step):
    made = bench(family, max_step_tokens=step)
    check(made.answer(PROMPT, "full", max_tokens=6), frozen(family, PROMPT, "full", 6))


@pytest.mark.parametrize("family", EACH)
def test_indexers_pick_of_what_is_linked(bench, family):
    made = bench(family, max_step_tokens=53)
    made.cache(PROMPT)
    for policy in ("naive", "legolink-1", "legolink-29", "attnlink-9", "random-40", "prefix"):
        check(made.answer(PROMPT, policy, max_tokens=3), frozen(family, PROMPT, policy))


@pytest.mark.parametrize("family", EACH)
def test_every_policy_by_what_it_says_that_it_computes(bench, family):
    made = bench(family)
    made.cache(SHORT)
    places = [layer.block for layer in made.loaded.layers]
    layers = range(made.loaded.anatomy.blocks)
    for policy in (each for each in EVERY_POLICY if each != "naive-unpositioned"):
        computed = computed_layers(made.explain(SHORT, policy), len(places))
        masks = [computed[max(0, np.searchsorted(places, index, "right") - 1)] for index in layers]
        with FirstOfEqual():
            expected = frozen_answer(family, SHORT, masks, 2)
        check(made.answer(SHORT, policy, max_tokens=2), expected)


@pytest.mark.parametrize("family", EACH)
def test_requests_beside_one_another_pick_of_their_own(bench, family):
    """Different prompts and policies in the same steps, few slots, so that some are preempted, and
    one is cancelled."""
    prompts = [linked_prompt(40 + 3 * seed, 37, fresh=8 + seed, seed=seed) for seed in range(4)]
    policies = ["naive", "legolink-7", "random-30", "full"]
    expected = [
        frozen(family, prompt, policy, 12) for prompt, policy in zip(prompts, policies, strict=True)
    ]
    made = bench(family, kv_slots=240, max_step_tokens=29)
    for prompt in prompts:
        made.cache(prompt)
    with made.held():
        outcomes = [
            made.submit(prompt, policy, max_tokens=12)[0]
            for prompt, policy in zip(prompts, policies, strict=True)
        ]
        gone, handle = made.submit(prompts[0], "full", max_tokens=12)
        handle.cancel()
    for outcome, found in zip(outcomes, expected, strict=True):
        check(outcome, found)
    assert gone.wait().finished.reason == "cancelled"


@pytest.mark.whole
@pytest.mark.parametrize("family", [TOKENS, BLOCKS])
@pytest.mark.parametrize("slots", [4096, 230])
def test_choices_see_their_prompts_tokens(bench, family, slots):
    """With few slots, choices are preempted, and take over each other's prompt."""
    made = bench(family, kv_slots=slots, max_step_tokens=29)
    made.cache(SHORT)
    sampled = {"temperature": 1.0, "max_tokens": 50}
    alone = [made.answer(SHORT, "legolink-4", seed=40 + each, **sampled) for each in range(3)]
    together = made.submit_choices(SHORT, 3, "legolink-4", seed=40, **sampled)[0]
    for outcome, expected in zip(together, alone, strict=True):
        check(outcome, (expected.tokens, expected.logprobs))
    wait_until(lambda: made.engine.scheduler.idle)


@pytest.mark.parametrize("family", EACH)
@pytest.mark.parametrize("policy", ["naive", "legolink-6"])
def test_prefixes_are_picked_from(bench, family, policy):
    """The same prompt again, and the next turn of its conversation."""
    made, alone = bench(family, prefix_cache="on"), bench(family)
    found = []
    for each in (made, alone):
        each.cache(SHORT)
        answer = each.answer(SHORT, policy, max_tokens=5)
        more = FreshSegment((*answer.tokens, *random_tokens(13, 5)))
        turn = Prompt((*SHORT.segments, more))
        found.append([answer, *(each.answer(prompt, policy) for prompt in (SHORT, turn))])
    for ours, expected in zip(*found, strict=True):
        check(ours, (expected.tokens, expected.logprobs))
    assert found[0][-1].finished.usage.exact_cached_tokens > 0


def test_in_bf16_the_first_answer_is_near_that_of_fp32(bench):
    """What indexers keep is rounded as KV is. Other tokens may be picked then: this is a model of
    which none matters much."""
    made = bench(model=prepare_model(tiny_model(TOKENS).bfloat16(), byte_tokenizer()))
    made.cache(SHORT)
    for policy in ("full", "naive", "random-30"):
        expected = frozen(TOKENS, SHORT, policy, 1)[1]
        found = made.answer(SHORT, policy, max_tokens=1).logprobs
        np.testing.assert_allclose(found, expected, atol=0.5)


@pytest.mark.parametrize("family", EACH)
def test_what_is_kept_is_counted_and_picked_by(bench, family):
    """A chunk takes the bytes that the engine says, and other index keys pick other tokens."""
    made = bench(family)
    made.cache(SHORT)
    before = made.answer(SHORT, "naive", max_tokens=1).logprobs
    generator = torch.Generator().manual_seed(0)
    for chunk in SHORT.chunks:
        key = chunk_key(chunk, fingerprint=made.engine.fingerprint, tenant="default")
        kv = made.store.get(key)
        assert kv.nbytes - kv.scores.nbytes == made.engine.kv_bytes(len(chunk))
        other = tuple(
            LayerKV(
                each.key,
                each.value,
                None if each.index is None else torch.randn(each.index.shape, generator=generator),
            )
            for each in kv.layers
        )
        made.store.delete(key)
        made.store.put(key, ChunkKV(other, kv.scores, kv.states))
    after = made.answer(SHORT, "naive", max_tokens=1).logprobs
    assert abs(after[0] - before[0]) > 20 * TOLERANCE


def test_a_chunk_that_is_exact_gives_the_models_own_answer(bench):
    """It is computed behind what stands before it in the prompt."""
    header = random_tokens(9, 1)
    chunk = Chunk(random_tokens(80, 2), prefix=header)
    fresh = FreshSegment(random_tokens(12, 3))
    prompt = Prompt((FreshSegment(header), CachedSegment(chunk), fresh))
    made = bench(TOKENS)
    made.cache(prompt)
    check(made.answer(prompt, "naive", max_tokens=4), frozen(TOKENS, prompt, "full", 4))
