import copy
import math
import pickle
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvlinker.base.errors import InvalidRequestError, KVLinkerError
from kvlinker.base.types.answers import TokenLogprob
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.engines.embedded.decoding.sampling import (
    BLOCK,
    Sampler,
    at_point,
    largest,
    likelihoods,
)

LOGITS = np.array([1.0, 3.0, 2.0, -1.0, 0.5], np.float32)


def draws(
    count=2000, tokens=(), prompt_length=0, logits=LOGITS, endings=(), bad_words=(), **params
):
    sampler = Sampler(
        SamplingParams(**params), prompt_length=prompt_length, endings=endings, bad_words=bad_words
    )
    history = np.array(tokens, np.int64)
    return [sampler.sample(logits, lambda: history) for _ in range(count)]


def softmax(scores):
    likely = np.exp(scores - scores.max())
    return likely / likely.sum()


def by_transformers(scores, temperature, top_k, top_p, min_p):
    """Probabilities as transformers' warpers leave them, in the order in which it applies them."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    rows = torch.from_numpy(scores).double()[None]
    return torch.softmax(warpers(None, rows), -1)[0].numpy()


def logprob(token: int, params: SamplingParams) -> TokenLogprob:
    """Return what is told of ``token`` to a request that wants log probabilities."""
    entry = Sampler(params, prompt_length=0).logprob(LOGITS, token, str)
    assert entry is not None
    return entry


def test_temperature_zero_is_greedy():
    assert set(draws(temperature=0)) == {1}


def test_sampling_follows_the_softmax():
    drawn = draws(20_000, seed=1)
    expected = softmax(LOGITS)
    for token in range(5):
        assert drawn.count(token) / 20_000 == pytest.approx(float(expected[token]), abs=0.02)


def test_temperature_sharpens():
    drawn = draws(5000, temperature=0.5, seed=1)
    assert drawn.count(1) / 5000 == pytest.approx(float(softmax(LOGITS / 0.5)[1]), abs=0.02)


FILTERS: list[tuple[dict[str, Any], set[int]]] = [
    ({"top_k": 2}, {1, 2}),
    ({"top_k": 1}, {1}),
    ({"top_p": 0.5}, {1}),
    ({"top_p": 0.85}, {1, 2}),
    ({"min_p": 0.3}, {1, 2}),
    ({"top_k": 3, "min_p": 0.3}, {1, 2}),
]


def test_filters_keep_the_likeliest(subtests):
    for params, allowed in FILTERS:
        with subtests.test(params=params):
            assert set(draws(seed=2, **params)) == allowed


@given(
    seed=st.integers(0, 100_000),
    size=st.integers(1, 400),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 7, 1000]),
    top_p=st.sampled_from([0.05, 0.5, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
)
def test_likelihoods_are_those_that_transformers_leaves(
    seed, size, temperature, top_k, top_p, min_p
):
    generator = np.random.default_rng(seed)
    scores = generator.permutation(np.linspace(-6, 6, size, dtype=np.float32))  # no two are alike
    found = likelihoods(scores, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = by_transformers(scores, temperature, top_k, top_p, min_p)
    np.testing.assert_allclose(found / found.sum(), expected, atol=1e-5)


def test_what_cannot_come_is_never_drawn():
    logits = np.array([-np.inf, 1.0, -np.inf, 1.0, -np.inf], np.float32)
    assert set(draws(500, seed=3, logits=logits)) == {1, 3}
    assert set(draws(500, seed=3, logits=logits, top_p=0.999, min_p=0.1)) == {1, 3}


def test_logits_that_are_not_finite_end_the_request(subtests):
    varied: list[dict[str, Any]] = [
        {"temperature": 0},
        {},
        {"top_p": 0.9},
        {"top_k": 2},
        {"min_p": 0.1},
    ]
    for params, value in product(varied, (np.nan, np.inf)):
        with subtests.test(params=params, value=value):
            logits = LOGITS.copy()
            logits[2] = value
            with pytest.raises(KVLinkerError, match="not all finite"):
                draws(1, logits=logits, **params)


EQUAL_TOKENS: list[tuple[dict[str, Any], int]] = [
    ({"top_p": 0}, 1),
    ({"top_p": 0.01}, 10),
    ({"top_p": 0.5}, 500),
    ({"top_k": 1}, 1),
    ({"top_k": 7}, 7),
    ({"top_k": 200, "top_p": 0.5}, 100),
    ({"min_p": 1}, 1000),
]


def test_filters_keep_no_more_of_equal_tokens_than_they_say(subtests):
    for params, count in EQUAL_TOKENS:
        with subtests.test(params=params):
            found = likelihoods(np.zeros(1000, np.float32), **params)
            assert np.flatnonzero(found).tolist() == list(range(count))


def test_scores_as_low_as_can_be_are_no_likelihood(recwarn):
    scores = np.array([np.finfo(np.float32).min, -np.inf, 3, 2], np.float32)
    found = likelihoods(scores, temperature=0.1, top_p=0.999)
    assert found[:2].tolist() == [0, 0]
    assert not recwarn


def test_the_logits_stay_as_they_are():
    logits = LOGITS.copy()
    draws(3, logits=logits, tokens=[1, 2], allowed_token_ids=(0, 1), presence_penalty=1, top_p=0.5)
    assert np.array_equal(logits, LOGITS)


def test_a_seed_repeats_and_another_does_not():
    assert draws(50, seed=7) == draws(50, seed=7)
    assert draws(50, seed=7) != draws(50, seed=8)
    assert draws(50) != draws(50)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64 + 5, np.int64(5)])
def test_any_whole_number_is_a_seed(seed):
    assert draws(20, seed=seed) == draws(20, seed=seed)


def test_presence_penalty_counts_once_and_only_generated_tokens():
    assert draws(1, temperature=0, presence_penalty=1.5, tokens=[1, 1, 1], prompt_length=0) == [2]
    assert draws(1, temperature=0, presence_penalty=1.5, tokens=[1, 1, 1], prompt_length=3) == [1]
    assert draws(1, temperature=0, presence_penalty=0.9, tokens=[1, 1, 1], prompt_length=0) == [1]


def test_frequency_penalty_counts_every_time():
    assert draws(1, temperature=0, frequency_penalty=0.9, tokens=[1], prompt_length=0) == [1]
    assert draws(1, temperature=0, frequency_penalty=0.9, tokens=[1, 1], prompt_length=0) == [2]


def test_repetition_penalty_counts_the_prompt_too():
    assert draws(1, temperature=0, repetition_penalty=2.0, tokens=[1], prompt_length=1) == [2]


def test_logprobs_are_of_the_raw_distribution():
    entry = logprob(2, SamplingParams(temperature=0.1, top_k=1, logprobs=2))
    expected = np.log(softmax(LOGITS))
    assert entry.token_id == 2
    assert entry.text == "2"
    assert entry.logprob == pytest.approx(float(expected[2]))
    assert [top.token_id for top in entry.top] == [1, 2]
    assert entry.top[0].logprob == pytest.approx(float(expected[1]))
    assert math.exp(entry.logprob) < 1


def test_the_chosen_token_is_among_the_best_even_if_others_are_as_likely():
    logits = np.zeros(1024, np.float32)
    logits[[5, 300, 700]] = 1
    sampler = Sampler(SamplingParams(temperature=0, logprobs=2), prompt_length=0)
    token = sampler.sample(logits, lambda: np.empty(0, np.int64))
    entry = sampler.logprob(logits, token, str)
    assert entry is not None
    assert [token, *(top.token_id for top in entry.top)] == [5, 5, 300]


def test_logprobs_only_where_wanted():
    assert Sampler(SamplingParams(), prompt_length=0).logprob(LOGITS, 2, str) is None
    assert logprob(2, SamplingParams(logprobs=0)).top == ()
    assert len(logprob(2, SamplingParams(logprobs=20)).top) == 5


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("temperature", -1),
    ("temperature", float("nan")),
    ("temperature", "warm"),
    ("top_p", 1.5),
    ("top_k", -1),
    ("top_k", 1.5),
    ("min_p", 2),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-300),
    ("presence_penalty", 3),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("prompt_logprobs", 1001),
    ("bad_words", ("",)),
    ("stop_token_ids", ("a",)),
    ("stop_token_ids", (2**70,)),
    ("stop_token_ids", (-1,)),
    ("logit_bias", {2**70: 1}),
    ("logit_bias", {"a": 1}),
    ("logit_bias", {5: 101}),
    ("logit_bias", {5: "much"}),
    ("max_tokens", True),
    ("logprobs", -1),
    ("stop", ("",)),
    ("stop", (3,)),
    ("stop", None),
    ("bad_words", 5),
    ("stop_token_ids", "5"),
    ("logit_bias", None),
    ("seed", "7"),
    ("seed", 1.5),
]


def test_parameters_out_of_range_are_refused_by_name(subtests):
    for name, value in OUT_OF_RANGE:
        with subtests.test(name, value=value):
            with pytest.raises(InvalidRequestError, match=name) as caught:
                SamplingParams(**{name: value})
            assert caught.value.param == name


def test_parameters_can_be_copied_and_sent_to_another_process():
    params = SamplingParams(logit_bias={5: 1}, stop=("a",))
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_whole_numbers_and_a_single_stop_text_will_do():
    params = SamplingParams(temperature=2, repetition_penalty=2, stop="abc")  # type: ignore[arg-type]  # not a tuple
    assert params.stop == ("abc",)
    assert SamplingParams(bad_words="abc").bad_words == ("abc",)  # type: ignore[arg-type]
    assert len(draws(3, temperature=2, repetition_penalty=2, tokens=[1], prompt_length=1)) == 3


def test_the_coldest_temperatures_are_greedy():
    assert set(draws(50, temperature=1e-40)) == {1}


def test_bias_is_added_to_logits():
    assert draws(1, temperature=0, logit_bias={0: 2.5}) == [0]
    assert draws(1, temperature=0, logit_bias={1: -1.5}) == [2]
    assert set(draws(200, seed=1, logit_bias={3: 100})) == {3}
    assert 1 not in draws(200, seed=1, logit_bias={1: -100})


def test_a_bad_word_never_becomes_whole():
    assert draws(1, temperature=0, bad_words=[(1,)]) == [2]
    assert draws(1, temperature=0, bad_words=[(4, 1)], tokens=[4]) == [2]
    assert draws(1, temperature=0, bad_words=[(4, 1)], tokens=[3]) == [1]


def test_an_answer_does_not_end_before_its_least_length():
    ending = {"temperature": 0, "endings": {1}, "min_tokens": 2, "prompt_length": 1}
    assert draws(1, tokens=[0], **ending) == [2]
    assert draws(1, tokens=[0, 4], **ending) == [2]
    assert draws(1, tokens=[0, 4, 4], **ending) == [1]


def test_forbidding_everything_is_an_error_with_the_way_out():
    with pytest.raises(InvalidRequestError, match=r"No token is left.*bad_words"):
        draws(1, bad_words=[(token,) for token in range(5)])


def test_the_least_length_is_not_more_than_the_most():
    with pytest.raises(InvalidRequestError, match=r"min_tokens \(9\)"):
        SamplingParams(max_tokens=8, min_tokens=9)


SIZES = st.one_of(st.integers(1, 3 * BLOCK), st.integers(1, 40).map(lambda n: n * BLOCK))


@given(
    seed=st.integers(0, 100_000),
    size=SIZES,
    count=st.integers(0, 30),
    values=st.sampled_from([1, 3, 50, 10**6]),
)
def test_the_largest_are_those_that_sorting_finds(seed, size, count, values):
    """Of equal ones the first, as where tokens are chosen."""
    row = np.random.default_rng(seed).integers(0, values, size).astype(np.float32)
    row[row == 0] = -np.inf
    count = min(count, size)
    found = largest(row, count)
    assert found.tolist() == np.argsort(-row, kind="stable")[:count].tolist()
    assert not count or found[0] == row.argmax()


@given(seed=st.integers(0, 100_000), size=SIZES, point=st.floats(0, 1, exclude_max=True))
def test_a_point_lies_where_all_weights_summed_up_say(seed, size, point):
    generator = np.random.default_rng(seed)
    weights = generator.integers(1, 9, size).astype(np.float32)  # whose sums are exact
    weights[generator.random(size) < 0.6] = 0
    weights[generator.integers(size)] = 3
    found = at_point(weights, point)
    assert weights[found] > 0
    ends = weights.cumsum(dtype=np.float64)
    assert found == np.searchsorted(ends, point * ends[-1], side="right")


def test_points_beyond_the_last_weight_by_rounding_are_its():
    weights = np.zeros(3 * BLOCK, np.float32)
    weights[[5, BLOCK + 3]] = 1
    assert at_point(weights, 1.0) == BLOCK + 3
