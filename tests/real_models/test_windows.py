"""At the end of SmolLM2's window, and across Gemma's sliding ones, answers are the model's own over
the same KV, up to rounding."""

from contextlib import closing

import pytest
import torch
from transformers.cache_utils import DynamicCache
from transformers.models.llama.modeling_llama import rotate_half

from kvlinker.base.errors import ContextLengthError
from kvlinker.base.types.chunks import Chunk
from kvlinker.prompting.segments import CachedSegment, FreshSegment, Prompt
from tests.engines.embedded.conftest import Bench
from tests.engines.embedded.reference import Reference
from tests.real_models.conftest import (
    GEMMA,
    LIKELIEST,
    MORE_THAN_ROUNDING,
    SMOLLM2,
    RealModel,
    answers,
    computed_masks,
    error,
)

WINDOW = 8192
"""SmolLM2's, in tokens."""

ANSWER = 8
"""The tokens that it has room for."""

SLIDING = 512
"""Gemma's windows, in tokens."""

LENGTHS = (SLIDING + 19, 211, 97)
"""The lengths of chunks that cross them."""


@pytest.fixture(scope="module")
def smollm2(state):
    return RealModel(SMOLLM2, state)


@torch.inference_mode()
def kept_behind(model, chunk, copies):
    """The KV of copies of a chunk behind one another, each computed alone in its place: that of the
    first with its keys turned further."""
    alone = model(input_ids=torch.tensor([chunk]), use_cache=True).past_key_values
    begins = torch.arange(copies) * len(chunk)
    cos, sin = model.model.rotary_emb(alone.layers[0].keys, begins[None])
    kept = DynamicCache()
    for index, layer in enumerate(alone.layers):
        turned = [
            layer.keys * cos[:, place] + rotate_half(layer.keys) * sin[:, place]
            for place in range(copies)
        ]
        kept.update(torch.cat(turned, 2), layer.values.repeat(1, 1, copies, 1), index)
    return kept


def test_the_last_tokens_of_a_window(smollm2):
    """One chunk stands eight times, and the answer ends where the window does."""
    chunk, fresh = smollm2.text[:1018], smollm2.text[1100:1140]
    segments = [CachedSegment(Chunk(chunk))] * 8
    prompt = Prompt((*segments, FreshSegment(fresh)))
    assert len(prompt) + ANSWER == WINDOW
    engine = Bench(model=smollm2.loaded, kv_slots=WINDOW, max_step_tokens=256)
    with closing(engine):
        assert engine.engine.max_model_len == WINDOW
        with pytest.raises(ContextLengthError, match=f"at most {ANSWER} tokens"):
            engine.submit(prompt, "naive", max_tokens=ANSWER + 1)
        full = Prompt((*prompt.segments, FreshSegment(fresh[:ANSWER])))
        with pytest.raises(ContextLengthError, match=f"has {WINDOW} tokens"):
            engine.submit(full, "naive", max_tokens=None)
        engine.cache(prompt)
        outcome = engine.answer(prompt, "naive", max_tokens=None, logprobs=LIKELIEST)
    assert outcome.finished.reason == "length"
    assert len(outcome.tokens) == ANSWER
    assert outcome.finished.usage.cached_tokens == len(prompt) - len(fresh)
    kept = kept_behind(smollm2.exact, chunk, len(segments))
    with torch.inference_mode():
        logits = smollm2.exact(
            input_ids=torch.tensor([[*fresh, *outcome.tokens[:-1]]]),
            past_key_values=kept,
            logits_to_keep=ANSWER,
        ).logits[0]
    expected = torch.log_softmax(logits.double(), -1)
    assert error(outcome, expected) <= MORE_THAN_ROUNDING * smollm2.rounding


def test_chunks_across_sliding_windows(state):
    """One is longer than a window, and others lie on the edge of a window of what follows."""
    gemma = RealModel(GEMMA, state)
    prompt = gemma.prompt(*LENGTHS)
    with closing(Bench(model=gemma.loaded, max_step_tokens=97)) as engine:
        assert {layer.window for layer in engine.loaded.layers} == {SLIDING, None}
        engine.cache(prompt)
        policies = ("full", "naive", "legolink-16", "query-15")
        asked = [(prompt, policy, "default") for policy in policies]
        outcomes = answers(engine, asked, max_tokens=6)
    reference = Reference(prompt, model=gemma.exact)
    for policy, outcome in zip(policies, outcomes, strict=True):
        expected = reference.distributions(computed_masks(engine, outcome), outcome.tokens)
        assert error(outcome, expected) <= MORE_THAN_ROUNDING * gemma.rounding, policy
