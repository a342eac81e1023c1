"""What indexers keep, how it is rotated, and which of equal scores they pick."""

import numpy as np
import pytest
import torch
from torch import nn

from kvlinker.engines.contract.cost import kv_bytes_per_token
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.indexers import (
    IndexerCall,
    LinkedCache,
    Picks,
    Queries,
    all_visible,
    picking_by,
    place_of,
)
from kvlinker.engines.embedded.model.oracles.referee import Referee
from tests.toy_models import INDEXED, tiny_model


class Toy(nn.Module):
    """Picks the tokens with the highest of one number each, of which it keeps a copy."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, position_ids=None):
        kept = past_key_values.update_indexer(hidden_states, 0)[0, :, 0]
        scores = kept.expand(hidden_states.shape[1], -1)
        scores = scores.masked_fill(~attention_mask[0], float("-inf"))
        return scores.topk(min(self.k, scores.shape[-1])).indices[None]


def call_of(module, hidden):
    tokens = hidden.shape[1]
    arguments = {
        "hidden_states": hidden,
        "attention_mask": all_visible(tokens, hidden.device)[:, 0],
        "past_key_values": None,
        "position_ids": torch.arange(tokens)[None],
    }
    return IndexerCall(module, type(module).forward, arguments)


def queries_at(positions, owner=None):
    rows = torch.arange(len(positions))
    return Queries(owner, np.array(positions), rows, rows)


@pytest.mark.parametrize("tokens", [4, 40, 400])
def test_of_equal_scores_the_first_tokens_are_picked(tokens):
    """However many there are: top-k itself leaves that open."""
    call = call_of(Toy(3), torch.zeros(1, tokens, 1))
    mask = call.picked(queries_at(range(tokens)), lambda kept: kept)
    assert mask[0, -1].nonzero().flatten().tolist() == [0, 1, 2]
    assert mask[0, 0].nonzero().flatten().tolist()[0] == 0


def test_queries_pick_of_all_that_is_kept_before_them():
    """Tokens at 2 and 5 of a sequence, of which the others are kept."""
    kept = torch.tensor([9.0, 8, 1, 2, 7, 3])[:, None]

    def linked(new):
        assert new.flatten().tolist() == [1.0, 3.0]
        return kept

    call = call_of(Toy(2), torch.tensor([[[1.0], [3.0]]]))
    mask = call.picked(queries_at([2, 5]), linked)
    assert mask.shape == (1, 2, 6)
    assert [row.nonzero().flatten().tolist() for row in mask[0]] == [[0, 1], [0, 1]]


def test_the_cache_is_that_of_every_layer():
    cache = LinkedCache(lambda kept: torch.cat([torch.zeros(3, 2), kept]), 5)
    assert cache.layers[7] is cache
    assert cache.get_seq_length() == 5
    assert cache.keys.shape[-2] == 5
    assert cache.update_indexer(torch.ones(1, 2, 2), 0).shape == (1, 5, 2)
    assert cache.update_index(torch.ones(1, 1, 2, 2)).shape == (1, 1, 5, 2)


def test_a_part_is_found_where_it_is():
    whole = torch.arange(12.0).view(2, 6)
    assert place_of(whole[:, 2:4], whole) == 2
    assert place_of(whole[:, 4:], whole) == 4
    assert place_of(torch.zeros(2, 2), whole) is None


@pytest.mark.parametrize("family", INDEXED)
def test_layers_say_what_their_indexers_keep(family):
    layers = anatomy_of(tiny_model(family)).layers
    kinds = [(layer.indexer is not None, layer.picker) for layer in layers]
    assert kinds == {
        "glm_moe_dsa-shared-picks": [(True, 0), (False, 0), (True, 2), (False, 2)],
        "hy_v4-picks-streams-sinks": [(True, 0), (False, 0), (True, 2), (False, 2)],
        "minimax_m3-blocks": [(False, None), (True, 1), (True, 2)],
        "qwen4_exp-blocks-states": [(True, 0), (True, 1)],
    }.get(family, [(True, 0), (True, 1), (True, 2)])
    kept = [layer.indexer for layer in layers if layer.indexer is not None]
    assert {each.dim for each in kept} == {16}
    assert {each.offset for each in kept} == {8 if family.startswith("hy_v4") else 0}
    without = sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers)
    assert kv_bytes_per_token(layers, torch.bfloat16) == 2 * (without + 16 * len(kept))


def test_the_referee_finds_picks_by_other_scores():
    """Rounding alone is forgiven: what is picked is the recorded choice, and ``error`` says how far
    the scores are from it."""
    module = Toy(2)
    module.__class__.__name__ = "ToyIndexer"
    hidden = torch.tensor([5.0, 1, 4, 4 - 1e-6, 0])[None, :, None]
    arguments = call_of(module, hidden).arguments | {
        "attention_mask": torch.ones(1, 5, 5, dtype=torch.bool).tril(),
        "past_key_values": LinkedCache(lambda kept: kept, 5),
    }
    referee = Referee()
    with referee.recording(module, "text"):
        module(**arguments)

    def picked(values):
        call = call_of(module, torch.tensor(values)[None, :, None])
        with picking_by(referee):
            mask = call.picked(queries_at(range(5), "text"), lambda kept: kept)
        return mask[0, -1].nonzero().flatten().tolist()

    assert picked([5.0, 1, 4 - 2e-6, 4, 0]) == [0, 2]
    assert 0 < referee.error < 1e-6
    assert picked([5.0, 1, 1, 4, 0]) == [0, 2]
    assert referee.error == pytest.approx(3 / 5)
    of_one = Picks().highest(module, None, np.arange(1), hidden[..., 0], 2)
    assert of_one.tolist() == [[0, 2]]
