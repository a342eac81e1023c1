"""What is read off a model's own rule is what the rule does."""

import pytest
import torch

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.contract.cost import ChunkSize
from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.discovery import anatomy_of
from kvlinker.engines.embedded.model.interception import Interceptor, intercepted
from kvlinker.engines.embedded.model.states.kept_states import FIRST_TOKENS, chunk_bytes, edges_of
from kvlinker.engines.embedded.model.states.known import RULES as RULES_KNOWN
from kvlinker.engines.embedded.model.states.recurrence import Recurrence
from kvlinker_lab.models.small_models import small_model
from tests.toy_models import loaded_model, tiny_model

RULES = {
    "qwen3_next-states": (3, 1, (4, 8, 16)),
    "qwen3_5-states": (3, 1, (4, 8, 16)),
    "kimi-states-latents": (3, 1, (4, 8, 8)),
    "granite-states-nope": (3, 1, (8, 16, 12)),
    "jamba-states-nope": (3, 1, (1, 128, 12)),
    "minimax-states": (2, 1, (4, 16, 16)),
    "falcon_h1-states-beside": (3, 3, (8, 16, 12)),
    "zamba2-states-behind": (4, 2, (8, 16, 12)),
    "zamba-states-of-heads": (8, 2, (1, 64, 12)),
    "falcon_mamba-alone": (3, 0, (1, 96, 12)),
    "mamba2-alone": (3, 0, (8, 16, 12)),
}
"""How many layers or parts of them keep a state, how many have attention, and a state's shape."""


class Noting(Interceptor):
    """Passes calls on to the model's own functions, and notes the last of each kind."""

    def attend(self, module, query, key, value, options):
        raise StopIteration

    def convolve(self, call):
        before = call.hidden.new_zeros(1, call.hidden.shape[1], call.weight.shape[-1] - 1)
        self.convolved = call.apply(before, call.hidden)
        return self.convolved

    def recur(self, call):
        self.call = call
        raise StopIteration

    def index(self, call):
        return call.nothing()


@pytest.mark.parametrize("family", RULES)
@torch.inference_mode()
def test_tokens_do_to_any_state_what_their_effect_says(family):
    model = tiny_model(family)
    anatomy = anatomy_of(model)
    recurrence = anatomy.recurrences[0]
    counts = len(anatomy.recurrences), len(anatomy.layers)
    assert (*counts, recurrence.state_shape) == RULES[family]
    assert anatomy.mingles == (min(counts) > 0 and sum(counts) > anatomy.blocks)
    noting = Noting()
    with pytest.raises(StopIteration), intercepted(noting):
        model(torch.arange(3, 43)[None], use_cache=False)
    call = noting.call
    assert bool(recurrence.columns) == call.rule.takes_channels
    for found, given in zip(recurrence.mixed(noting.convolved), call.mixed, strict=False):
        assert torch.equal(found, given)
    mixed = call.mixed
    state = torch.randn(1, *recurrence.state_shape)

    def part(begin, end):
        return tuple(tuple(each[:, begin:end] for each in parts) for parts in (mixed, call.gates))

    first = call.effect(*part(0, 7), None)
    both = call.effect(*part(7, 40), first)
    output, expected = call.scan(*part(0, 40), state)
    torch.testing.assert_close(recurrence.applied(both, state), expected, rtol=1e-4, atol=1e-5)
    one_by_one, outputs = state, []
    for token in range(40):
        found, one_by_one = call.scan(*part(token, token + 1), one_by_one)
        outputs.append(found)
    torch.testing.assert_close(one_by_one, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat(outputs, 1), output, rtol=1e-4, atol=1e-5)


def edges(window, tokens, rule=True):
    of_one = Recurrence(RULES_KNOWN[0] if rule else None, (), 8, window, (0, 0, 0), 0)
    return edges_of(Anatomy((), (of_one,), 1, mingles=False), tokens, FIRST_TOKENS)


def test_edges_leave_the_last_token_what_its_convolution_sees():
    assert edges(3, 35) == (35, 35, 35, 35)
    assert edges(3, 36) == (32, 35, 36, 32)
    assert edges(40, 81) == (40, 80, 81, 40)
    assert edges(40, 80) == (80, 80, 80, 80)


def test_where_layers_only_convolve_the_last_tokens_are_the_edge():
    assert edges(2, 100, rule=False) == (0, 97, 100, 97)
    assert edges(2, 1, rule=False) == (0, 0, 1, 0)
    anatomy = anatomy_of(tiny_model("lfm2-convolutions"))
    assert len(anatomy.recurrences) == 2
    assert anatomy.only_convolves
    kept, whole = (
        chunk_bytes(anatomy, 100, torch.bfloat16, keeps_inner=keeps) for keeps in (False, True)
    )
    assert (kept, whole) == (2 * 3 * 64 * 2, 2 * 100 * 64 * 2)


def test_maps_take_the_same_for_chunks_of_any_length():
    """Qwen3-Next 80B's own sizes: 36 layers, of 32 heads of 128 × 128, in bf16."""
    anatomy = anatomy_of(small_model("qwen3_next"))
    of_one = anatomy.recurrences[0]
    assert (of_one.state_shape, of_one.channels) == ((32, 128, 128), 8192)
    assert of_one.effect_bytes(torch.bfloat16) * 36 == 75_497_472
    sizes = {
        tokens: chunk_bytes(anatomy, tokens, torch.bfloat16, keeps_inner=False)
        for tokens in (512, 2048)
    }
    assert sizes[512] == sizes[2048]
    whole = chunk_bytes(anatomy, 512, torch.bfloat16, keeps_inner=True) - sizes[512]
    assert whole == (512 - FIRST_TOKENS - 1) * 3 * of_one.entering_bytes(torch.bfloat16)


@pytest.mark.parametrize("family", ["llama", "qwen3_5-states", "lfm2-convolutions"])
def test_what_chunks_take_is_so_much_for_each_and_for_each_token(family):
    loaded = loaded_model(family)
    size = ChunkSize.of(loaded.kv_bytes)
    assert (size.per_chunk > 0) == (family == "qwen3_5-states")
    assert size.per_token >= loaded.kv_bytes_per_token
    for tokens in (100, 512):
        assert loaded.kv_bytes(tokens) == size.per_chunk + tokens * size.per_token


@pytest.mark.parametrize("kind", ["reformer"])
def test_states_of_other_kinds_are_refused(kind):
    with pytest.raises(UnsupportedModelError, match="keep a state instead of"):
        anatomy_of(small_model(kind))
