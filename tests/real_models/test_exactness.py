"""Linking is exact with real weights: answers are the model's own in fp32, up to the rounding of
its own pass in bfloat16; and where the engine computes in fp32, up to the rounding of that."""

from collections.abc import Iterator
from contextlib import closing
from functools import cache

import pytest
from torch import Tensor

from kvlinker.prompting.segments import Prompt
from tests.engines.embedded.conftest import Bench
from tests.engines.embedded.execution.test_oracle import (
    answer_over_a_spoiled_pool,
    plant,
    plant_layer_by_layer,
)
from tests.engines.embedded.reference import Reference
from tests.real_models.conftest import (
    LIKELIEST,
    MORE_THAN_ROUNDING,
    RealModel,
    answers,
    computed_masks,
    distributions,
    error,
)

LENGTHS = (71, 38, 54)
"""The chunks' lengths in tokens: no multiples of what the engine's steps and tiles have."""

STEP = 97
"""The most tokens of one of the engine's steps."""

FINER = {"bfloat16": 1.0, "float32": 2.0**-11}
"""The largest errors in relation to those in bfloat16. Numbers in fp32 are rounded 2^-16 times as
coarsely, but angles of rotary embeddings are in fp32 in both, and make errors up to 2^-13 times as
large as bfloat16's."""

TOKENS = 6
"""The tokens of an answer."""


@pytest.fixture(scope="module", params=FINER)
def made(real: RealModel, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """An engine that computes the model in this precision."""
    loaded = real.loaded if request.param == "bfloat16" else real.loaded_in_fp32()
    with closing(engine_of(loaded)) as engine:
        yield engine


def engine_of(loaded):
    return Bench(model=loaded, max_step_tokens=STEP, prefix_cache="on")


@pytest.fixture
def allowed(real, made):
    """The largest error that is rounding, in nats."""
    precision = str(made.loaded.dtype).removeprefix("torch.")
    return MORE_THAN_ROUNDING * real.rounding * FINER[precision]


def test_several_requests_at_once_are_linked_as_the_model_would(real, made, allowed):
    """Chunks were computed alone. In transformers' pass, the tokens of chunks that a layer does not
    compute have the keys and values that transformers computes of the chunk alone."""
    first, other = real.prompt(*LENGTHS), real.prompt(*reversed(LENGTHS), header=0)
    for prompt in (first, other):
        made.cache(prompt)
    policies = {"naive": first, "cacheblend-20": first, "legolink-16": other, "query-15": other}
    asked = [(prompt, policy, "default") for policy, prompt in policies.items()]
    outcomes = answers(made, asked, max_tokens=TOKENS)
    reference = cache(lambda prompt: Reference(prompt, model=real.exact))
    for (prompt, policy, _), outcome in zip(asked, outcomes, strict=True):
        masks = computed_masks(made, outcome)
        assert any(mask.any() for mask in masks) == (policy != "naive")
        expected = reference(prompt).distributions(masks, outcome.tokens)
        assert error(outcome, expected) <= allowed, policy


class Own:
    """The model's own distributions of the answers to a prompt, computed once for equal
    answers."""

    def __init__(self, real: RealModel, prompt: Prompt) -> None:
        self._real, self._prompt = real, prompt
        self._known: dict[tuple[int, ...], Tensor] = {}

    def error(self, outcome):
        answer = tuple(outcome.tokens)
        if answer not in self._known:
            tokens = [*self._prompt.tokens.tolist(), *answer[:-1]]
            self._known[answer] = distributions(self._real.exact, tokens, len(answer))
        return error(outcome, self._known[answer])


def test_policies_compute_what_is_garbage(real, made, allowed):
    """Chunks have the KV of the prompt's own pass, and garbage where a layer computes again."""
    prompt = real.prompt(*LENGTHS)
    own = Own(real, prompt)
    policies = ("legolink-16", "random-40", "h2o-30", "cacheblend-20")
    asked = [(prompt, policy, plant_layer_by_layer(made, prompt, policy)) for policy in policies]
    outcomes = answers(made, asked, max_tokens=TOKENS)
    for (_, policy, _), outcome in zip(asked, outcomes, strict=True):
        assert any(mask.any() for mask in computed_masks(made, outcome))
        assert own.error(outcome) <= allowed, policy


def test_the_second_pass_computes_what_is_garbage(real, made, allowed):
    """Once the question's attention was seen over the KV of the prompt's own pass, garbage takes
    the place of all that was selected; so in the first answer, and in one that reuses it."""
    prompt = real.prompt(*LENGTHS)
    own = Own(real, prompt)
    with closing(engine_of(made.loaded)) as alone:  # no beginning of another request is spoiled
        for outcome in answer_over_a_spoiled_pool(
            alone, prompt, ["query-15"], max_tokens=TOKENS, logprobs=LIKELIEST
        ):
            assert own.error(outcome) <= allowed


def test_garbage_that_no_layer_computes_shows(real, made, allowed):
    prompt = real.prompt(*LENGTHS)
    plant(made, prompt, "legolink-1", tenant="spoiled")
    (outcome,) = answers(made, [(prompt, "naive", "spoiled")], max_tokens=TOKENS)
    assert Own(real, prompt).error(outcome) > 10 * allowed
