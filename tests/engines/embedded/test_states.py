"""Models whose layers keep a state: what the engine answers is what transformers answers where the
hidden states of kept tokens are those of the chunk alone, and states are exact given them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlinker.base.errors import InvalidRequestError, ModelLoadError, PolicyError
from kvlinker.base.types.chunks import Chunk, chunk_key
from kvlinker.engines.embedded.model.states.delta_rule import DeltaRule
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.linking import Evidence, parse_policy
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from tests.engines.embedded.conftest import (
    EVERY_POLICY,
    full_forward,
    linked_prompt,
    random_tokens,
)
from tests.engines.embedded.execution.test_oracle import computed_layers
from tests.engines.embedded.frozen_reference import frozen_answer
from tests.engines.native.native_targets import HERE
from tests.toy_models import HYBRIDS, STATES_ALONE, loaded_model, tiny_model
from tests.waiting import wait_until

TOLERANCE = 5e-5
"""Of log probabilities: rounding alone comes to 3.4e-5, where Mamba 2 computes scattered tokens."""

PROMPT = linked_prompt(50, 36, 3, 130, 35, 1, header=5, middle=2, fresh=9)
"""Chunks with and without inner tokens, and chunks that are shorter than a convolution sees."""

SHORT = linked_prompt(50, 41, header=5, middle=2, fresh=9)
DELTA, MAMBA, BESIDE = "qwen3_5-states", "granite-states-nope", "falcon_h1-states-beside"
BEHIND, CONVOLUTIONS = "zamba2-states-behind", "lfm2-convolutions"
ELEMENTS, LIGHTNING = "jamba-states-nope", "minimax-states"
HEADS, ALONE = "zamba-states-of-heads", "mamba2-alone"
SOME = (DELTA, MAMBA, CONVOLUTIONS, ELEMENTS, LIGHTNING, ALONE)
EVERY = [*HYBRIDS, *STATES_ALONE]


def check(outcome, expected):
    tokens, logprobs = expected
    assert outcome.wait().failed is None
    assert outcome.tokens == tokens
    np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)


def frozen(family, prompt, policy, steps=4):
    """What a policy that looks at the prompt alone is to answer."""
    selected = parse_policy(policy).select(prompt, Evidence())
    return frozen_answer(family, prompt, [selected], steps)


def without_inputs(family):
    """The model as it runs with ``state_inputs`` off."""
    return prepare_model(tiny_model(family), byte_tokenizer(), state_inputs=False)


def in_bf16(family):
    return prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("step", [37, 2048])
def test_everything_computed_is_the_model(bench, family, step):
    made = bench(family, max_step_tokens=step)
    expected = full_forward(family, PROMPT, 6)
    check(made.answer(PROMPT, "full", max_tokens=6), expected)


@pytest.mark.parametrize("family", EVERY)
def test_kept_tokens_have_their_own_hidden_states(bench, family):
    made = bench(family, max_step_tokens=53)
    made.cache(PROMPT)
    for policy in ("naive", "legolink-1", "legolink-29", "attnlink-9", "random-40", "prefix"):
        check(made.answer(PROMPT, policy, max_tokens=3), frozen(family, PROMPT, policy, 3))


@pytest.mark.parametrize("family", EVERY)
def test_every_policy_by_what_it_says_that_it_computes(bench, family):
    made = bench(family)
    made.cache(SHORT)
    places = [layer.block for layer in made.loaded.layers]
    layers = range(made.loaded.anatomy.blocks)
    for policy in (each for each in EVERY_POLICY if each != "naive-unpositioned"):
        if refusal := made.engine.unsupported(parse_policy(policy)):
            needs = parse_policy(policy).needs
            if family in STATES_ALONE:
                assert "no attention" in refusal
                assert needs.reads_scores or needs.refines or needs.question_attention
            else:
                assert needs.refines
                assert family in (BESIDE, BEHIND, HEADS)
            continue
        computed = computed_layers(made.explain(SHORT, policy), max(1, len(places)))
        masks = [computed[max(0, np.searchsorted(places, index, "right") - 1)] for index in layers]
        check(made.answer(SHORT, policy, max_tokens=2), frozen_answer(family, SHORT, masks, 2))


@pytest.mark.whole
@pytest.mark.parametrize("family", [each for each in SOME if each != CONVOLUTIONS] + [HEADS])
def test_without_inputs_maps_alone_are_kept(bench, family):
    """The same answers from less, and policies that need more are refused."""
    made = bench(model=without_inputs(family), max_step_tokens=53)
    made.cache(PROMPT)
    for policy in ("naive", "legolink-29", "legolink-5+legolink-3", "set-prefix"):
        check(made.answer(PROMPT, policy, max_tokens=3), frozen(family, PROMPT, policy, 3))
    for policy in ("legolink-33", "random-10", "query-5", "legolink-2+random-5", "cacheblend-20"):
        with pytest.raises(PolicyError, match=r"state_inputs is off|no attention|drops tokens"):
            made.submit(PROMPT, policy)
    whole = bench(family)
    assert made.engine.fingerprint != whole.engine.fingerprint
    whole.cache(PROMPT)
    for chunk in PROMPT.chunks:
        sizes = []
        for each in (made, whole):
            key = chunk_key(chunk, fingerprint=each.engine.fingerprint, tenant="default")
            kv = each.store.get(key)
            sizes.append(kv.nbytes - (0 if kv.scores is None else kv.scores.nbytes))
            assert sizes[-1] == each.engine.kv_bytes(len(chunk))
        assert sizes[0] <= sizes[1]


def test_without_inputs_convolutions_follow_legolink_of_any_length(bench):
    """What a chunk keeps is what the convolution behind it sees."""
    made = bench(model=without_inputs(CONVOLUTIONS), max_step_tokens=53)
    made.cache(PROMPT)
    for policy in ("naive", "legolink-1", "legolink-29", "legolink-49", "legolink-129"):
        check(made.answer(PROMPT, policy, max_tokens=3), frozen(CONVOLUTIONS, PROMPT, policy, 3))
    for policy in ("random-10", "attnlink-9", "query-5"):
        with pytest.raises(PolicyError, match="only their inputs at a chunk's end"):
            made.submit(PROMPT, policy)


@pytest.mark.parametrize("family", SOME)
def test_in_bf16_answers_are_those_of_fp32_but_for_rounding(bench, family):
    """States stay in fp32; what chunks keep is rounded once, as KV is."""
    made = bench(model=in_bf16(family))
    made.cache(SHORT)
    for policy in ("full", "naive", "legolink-4", "random-30"):
        expected = frozen(family, SHORT, policy, 1)[1]
        np.testing.assert_allclose(
            made.answer(SHORT, policy, max_tokens=1).logprobs, expected, atol=0.15
        )


@pytest.mark.parametrize("family", [DELTA, MAMBA, CONVOLUTIONS, ALONE])
def test_a_prompt_may_end_in_a_chunk(bench, family):
    last = Chunk(random_tokens(70, 7))
    prompt = Prompt((FreshSegment(random_tokens(4, 8)), CachedSegment(last)))
    made = bench(model=without_inputs(family))
    made.cache(prompt)
    for policy in ("naive", "legolink-3"):
        check(made.answer(prompt, policy, max_tokens=3), frozen(family, prompt, policy, 3))


@pytest.mark.parametrize("family", [DELTA, MAMBA, CONVOLUTIONS, ALONE])
def test_a_chunk_that_is_exact_gives_the_models_own_answer(bench, family):
    """It is computed behind what stands before it in the prompt."""
    header = random_tokens(9, 1)
    chunk = Chunk(random_tokens(80, 2), prefix=header)
    fresh = FreshSegment(random_tokens(12, 3))
    prompt = Prompt((FreshSegment(header), CachedSegment(chunk), fresh))
    made = bench(family)
    made.cache(prompt)
    check(made.answer(prompt, "naive", max_tokens=4), full_forward(family, prompt, 4))


def test_what_is_computed_again_is_not_looked_at(bench):
    """Garbage in all that a chunk keeps of the tokens that LegoLink computes."""
    made = bench(MAMBA)
    made.cache(SHORT)
    expected = made.answer(SHORT, "legolink-6")
    for chunk in SHORT.chunks:
        key = chunk_key(chunk, fingerprint=made.engine.fingerprint, tenant="default")
        kv = made.store.get(key)
        made.store.delete(key)
        made.store.put(key, spoiled(kv, 6))
    again = made.answer(SHORT, "legolink-6")
    assert again.logprobs == expected.logprobs
    assert made.answer(SHORT, "legolink-5").logprobs != expected.logprobs


def spoiled(kv, count):
    """Garbage in the first tokens of the chunk."""

    def changed(tensor, rows):
        tensor = tensor.clone()
        tensor[rows] = 77.0
        return tensor

    head = slice(0, count)
    layers = tuple(
        LayerKV(*(changed(each, (slice(None), head)) for each in (layer.key, layer.value)))
        for layer in kv.layers
    )
    states = tuple(
        replace(
            state,
            mixed=changed(state.mixed, head),
            gates=tuple(changed(gate, head) for gate in state.gates),
        )
        for state in kv.states
    )
    return ChunkKV(layers, kv.scores, states)


def uneven(offset):
    """Half of the first column up to twice the last one."""
    return offset * torch.linspace(0.5, 2, offset.shape[-1])


@pytest.mark.parametrize("family", [each for each in SOME if each != CONVOLUTIONS])
def test_states_remember_for_hundreds_of_tokens(bench, family):
    """What a chunk wrote into states is seen behind 400 other tokens: else nothing was tested."""
    prompt = linked_prompt(60, 400, fresh=9)
    made = bench(family)
    made.cache(prompt)
    before = made.answer(prompt, "naive", max_tokens=1).logprobs
    key = chunk_key(prompt.chunks[0], fingerprint=made.engine.fingerprint, tenant="default")
    kv = made.store.get(key)
    states = tuple(
        replace(state, effect=state.effect and (state.effect[0], uneven(state.effect[1])))
        for state in kv.states
    )
    made.store.delete(key)
    made.store.put(key, replace(kv, states=states))
    after = made.answer(prompt, "naive", max_tokens=1).logprobs
    assert abs(after[0] - before[0]) > 10 * TOLERANCE


@pytest.mark.parametrize("family", [*SOME, BESIDE, BEHIND, HEADS])
def test_requests_beside_one_another_have_states_of_their_own(bench, family):
    """Different prompts and policies in the same steps, few slots, so that some are preempted, and
    some are cancelled."""
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
@pytest.mark.parametrize("family", [DELTA, MAMBA, CONVOLUTIONS, ALONE])
@pytest.mark.parametrize("slots", [4096, 230])
def test_choices_go_on_from_the_state_of_their_prompt(bench, family, slots):
    """With few slots, choices are preempted, and take over each other's prompt."""
    made = bench(family, kv_slots=slots, max_step_tokens=29)
    made.cache(SHORT)
    sampled = {"temperature": 1.0, "max_tokens": 50}
    alone = [made.answer(SHORT, "legolink-4", seed=40 + each, **sampled) for each in range(3)]
    together = made.submit_choices(SHORT, 3, "legolink-4", seed=40, **sampled)[0]
    for outcome, expected in zip(together, alone, strict=True):
        check(outcome, (expected.tokens, expected.logprobs))
    assert len({tuple(outcome.tokens) for outcome in together}) == 3
    wait_until(lambda: made.engine.scheduler.idle)


@pytest.mark.parametrize("family", SOME)
def test_a_state_keeps_no_more_in_memory_than_itself(bench, family, monkeypatch):
    reached = []
    reach = TokenSequence.reach

    def noted(self, states):
        reached.extend(states)
        reach(self, states)

    monkeypatch.setattr(TokenSequence, "reach", noted)
    assert bench(family).answer(SHORT, "full", max_tokens=3).finished is not None
    tensors = [
        tensor for state in reached for each in state.layers for tensor in (each.before, each.state)
    ]
    assert len(tensors) > 4
    for tensor in tensors:
        assert tensor.untyped_storage().nbytes() <= max(tensor.nbytes, 64)


@pytest.mark.skipif(not HERE, reason="no native code for this CPU")
def test_decoding_takes_native_steps(bench, monkeypatch):
    """One call for all sequences that decode together, in each of the layers."""
    sizes = []
    computed = DeltaRule.__call__

    def counted(self, mixed, gates, states):
        sizes.append(len(states))
        return computed(self, mixed, gates, states)

    monkeypatch.setattr(DeltaRule, "__call__", counted)
    expected = full_forward(DELTA, SHORT, 5)
    made = bench(DELTA)
    for outcome in made.submit_choices(SHORT, 3, "full", max_tokens=5)[0]:
        check(outcome, expected)
    assert sizes.count(3) >= len(made.loaded.anatomy.recurrences)
    sizes.clear()
    made = bench(DELTA, native="off")
    check(made.answer(SHORT, "full", max_tokens=5), expected)
    assert not sizes


@pytest.mark.parametrize(
    ("make", "family"),
    [
        *((loaded_model, family) for family in EVERY),
        *((in_bf16, family) for family in (DELTA, ELEMENTS, ALONE)),
        *((without_inputs, family) for family in (DELTA, CONVOLUTIONS, ALONE)),
    ],
)
def test_what_was_stored_has_the_shape_that_is_looked_for(bench, make, family):
    """And nothing that lacks a layer, a token or the inner ones has."""
    loaded = make(family)
    made = bench(model=loaded)
    made.cache(PROMPT)
    for chunk in PROMPT.chunks:
        key = chunk_key(chunk, fingerprint=loaded.fingerprint, tenant="default")
        kv = made.store.get(key)
        assert loaded.are_states_of(len(chunk), kv.states)
        last = kv.states[-1]
        others = [replace(last, mixed=last.mixed[1:]), replace(last, mixed=last.mixed[:, 1:])]
        others += [replace(last, gates=tuple(part[1:] for part in last.gates))] * bool(last.gates)
        others += [replace(last, inner=()), replace(last, inner=last.inner[:-1])] * bool(last.inner)
        others += [replace(last, effect=None)] * bool(last.effect)
        assert not loaded.are_states_of(len(chunk), kv.states[:-1])
        for other in others:
            assert not loaded.are_states_of(len(chunk), (*kv.states[:-1], other))


def test_answers_are_not_kept(bench):
    made = bench(DELTA)
    with pytest.raises(InvalidRequestError, match="keep a state are not kept") as refused:
        made.submit(SHORT, "naive", keeps=True)
    assert refused.value.param == "link.keep"
    with pytest.raises(ModelLoadError, match="leave keep_answers off"):
        bench(DELTA, keep_answers="answer")


def follow_up(prompt, tokens, seed):
    """The next turn of a conversation: the prompt, its answer and something new."""
    more = FreshSegment((*tokens, *random_tokens(13, seed)))
    return Prompt((*prompt.segments, more))


@pytest.mark.parametrize("family", [DELTA, MAMBA, BESIDE, CONVOLUTIONS, ALONE])
@pytest.mark.parametrize("policy", ["full", "naive", "legolink-6", "random-30"])
def test_turns_go_on_from_the_end_of_the_answer_before(bench, family, policy):
    made = bench(family, prefix_cache="on", max_step_tokens=29)
    made.cache(SHORT)
    prompt = SHORT
    for turn in range(3):
        answer = made.answer(prompt, policy, max_tokens=9)
        if policy == "full":
            check(answer, full_forward(family, prompt, 9))
        elif policy != "random-30":  # which chooses by the whole prompt
            check(answer, frozen(family, prompt, policy, 9))
        usage = answer.finished.usage
        reused = usage.exact_cached_tokens
        assert reused >= (len(SHORT) + 8 if turn and policy == "full" else 0)
        if turn and policy == "legolink-6":
            assert usage.fresh_tokens == 13 + 1  # the answer's last token was not computed
        prompt = follow_up(prompt, answer.tokens, turn)


@pytest.mark.whole
@pytest.mark.parametrize("family", [DELTA, MAMBA])
@pytest.mark.parametrize("policy", ["naive", "legolink-6", "query-20", "cacheblend-20"])
def test_prompts_go_on_from_the_end_of_documents_and_before_the_last_token(bench, family, policy):
    """The same prompt again, and another question about the same documents."""
    made, alone = bench(family, prefix_cache="on"), bench(family)
    other = Prompt((*SHORT.segments[:-1], FreshSegment(random_tokens(12, 99))))
    found = []
    for each in (made, alone):
        each.cache(SHORT)
        found.append([each.answer(prompt, policy) for prompt in (SHORT, SHORT, other, other)])
    for ours, expected in zip(*found, strict=True):
        check(ours, (expected.tokens, expected.logprobs))
    computed = [answer.finished.usage.fresh_tokens for answer in found[0]]
    if policy in ("naive", "legolink-6"):
        assert computed == [5 + 2 + 2 + 9, 1, 2 + 12, 1]


def test_turns_that_end_are_gone_on_from(bench):
    """What all conversations begin with, up to its end of turn."""
    made = bench(DELTA, prefix_cache="on")
    ending = min(made.loaded.eos_token_ids)
    header = (*random_tokens(40, 1), ending)
    for seed in range(2):
        prompt = Prompt((FreshSegment((*header, *random_tokens(20, 50 + seed))),))
        answer = made.answer(prompt, "full", max_tokens=5)
        check(answer, full_forward(DELTA, prompt, 5))
        assert answer.finished.usage.exact_cached_tokens == (41 if seed else 0)


@pytest.mark.parametrize("family", [DELTA, MAMBA])
def test_what_is_gone_is_computed_again(bench, family):
    """Few slots and few states: prefixes are given up, requests are preempted, and answers stay."""
    made = bench(family, prefix_cache="on", kv_slots=260, max_step_tokens=29, max_running=3)
    prompts = [linked_prompt(40 + 3 * seed, 37, fresh=8 + seed, seed=seed) for seed in range(4)]
    for prompt in prompts:
        made.cache(prompt)
    policies = ["naive", "legolink-7", "full", "query-20"]
    for turn in range(2):
        with made.held():
            outcomes = [
                made.submit(prompt, policy, max_tokens=20)[0]
                for prompt, policy in zip(prompts, policies, strict=True)
            ]
        found = [outcome.wait() for outcome in outcomes]
        for prompt, policy, outcome in zip(prompts[:3], policies[:3], found[:3], strict=True):
            expected = (
                full_forward(family, prompt, 20)
                if policy == "full"
                else frozen(family, prompt, policy, 20)
            )
            check(outcome, expected)
        prompts = [
            follow_up(prompt, outcome.tokens, turn)
            for prompt, outcome in zip(prompts, found, strict=True)
        ]
