"""What a plan takes of each chunk as it was cached."""

import numpy as np
import pytest

from kvlinker.linking import make_plan, parse_policy
from kvlinker.linking.plan import chunk_uses
from tests.linking.test_policies import NOTHING, chunk_prompt


def shares(policy, *lengths, layers=4, dropped=(), **options):
    prompt = chunk_prompt(*lengths, **options)
    uses = chunk_uses(make_plan(prompt, parse_policy(policy), NOTHING), layers, dropped)
    return [(prompt.chunks.index(use.chunk), pytest.approx(use.recomputed)) for use in uses]


def test_the_share_of_a_chunk_is_what_is_computed_of_its_tokens():
    assert shares("legolink-2", 8, 4, header=2) == [(0, 2 / 8), (1, 2 / 4)]
    assert shares("naive", 8, 4, header=2) == [(0, 0), (1, 0)]


def test_chunks_that_are_not_placed_are_not_used():
    assert shares("full", 8, 4, header=2) == []
    assert shares("prefix", 8, 4) == [(0, 0)]
    assert shares("legolink-4", 8, 4, header=2) == [(0, 4 / 8)]


def test_the_prompts_last_token_counts_where_it_is_a_chunks():
    assert shares("naive", 8, 4, fresh=0) == [(0, 0), (1, 1 / 4)]


def test_tokens_that_are_dropped_on_the_way_count_for_the_layers_before():
    dropped = [(1, np.arange(2, 6)), (3, np.array([10, 11]))]
    assert shares("cacheblend-50", 8, 4, header=2, dropped=dropped)[0] == (0, (8 + 3 * 4) / (4 * 8))
