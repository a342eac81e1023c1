"""Layers that keep a state, in prompts of any shape: chunks of any length, beside each other or
not, behind any header, in steps of any size, with other requests in the same steps."""

from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlinker.linking import Evidence, parse_policy
from tests.engines.embedded.conftest import Bench, full_forward, linked_prompt
from tests.engines.embedded.frozen_reference import frozen_answer
from tests.properties import examples
from tests.toy_models import HYBRIDS, STATES_ALONE

pytestmark = pytest.mark.whole

TOLERANCE = 1e-4
STEPS = 2
LENGTHS = st.one_of(st.integers(1, 6), st.integers(30, 40), st.integers(1, 130))
"""Many about where a chunk has a map besides its edges, and where convolutions see all of it."""

POLICIES = [
    "full",
    "naive",
    "prefix",
    "legolink-1",
    "legolink-29",
    "legolink-33",
    "attnlink-5",
    "random-10",
    "random-40",
]
PROMPTS = st.builds(
    lambda lengths, **others: linked_prompt(*lengths, **others),
    st.lists(LENGTHS, max_size=6),
    header=st.integers(0, 6),
    middle=st.integers(0, 3),
    fresh=st.integers(1, 12),
    seed=st.integers(0, 1000),
)


def expected(family, prompt, policy):
    if not prompt.chunks or policy == "full":
        return full_forward(family, prompt, STEPS)
    selected = parse_policy(policy).select(prompt, Evidence())
    return frozen_answer(family, prompt, [selected], STEPS)


@examples(40)
@given(
    family=st.sampled_from([*HYBRIDS, *STATES_ALONE]),
    asked=st.lists(st.tuples(PROMPTS, st.sampled_from(POLICIES)), min_size=1, max_size=3),
    step=st.sampled_from([4, 7, 29, 64, 2048]),
    more_slots=st.sampled_from([60, 4096]),
)
def test_answers_are_those_of_the_model_with_frozen_hidden_states(family, asked, step, more_slots):
    slots = more_slots + max(len(prompt) for prompt, _ in asked)
    wanted = [expected(family, prompt, policy) for prompt, policy in asked]
    with closing(Bench(family, max_step_tokens=step, kv_slots=slots)) as made:
        for prompt, _ in asked:
            made.cache(prompt)
        with made.held():
            outcomes = [
                made.submit(prompt, policy, max_tokens=STEPS)[0] for prompt, policy in asked
            ]
        for (tokens, logprobs), outcome in zip(wanted, outcomes, strict=True):
            assert outcome.wait().failed is None
            assert outcome.tokens == tokens
            np.testing.assert_allclose(outcome.logprobs, logprobs, atol=TOLERANCE)
