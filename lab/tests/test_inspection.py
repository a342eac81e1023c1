"""What is seen inside the engine, against the models' own attention and KV."""

import pytest
import torch

from kvlinker.engines.embedded.model.interception import ATTENTION_NAME, attention_of
from kvlinker.llm import LLM
from kvlinker.settings import load_settings
from kvlinker_lab.inspection import (
    LAST_QUERIES,
    EngineInspector,
    attention_deviation,
    relative_kv_distance,
)
from tests.quality.evaluation.conftest import make_example
from tests.toy_models import loaded_model

FAMILIES = (
    "llama",
    "qwen3",
    "mistral-window",
    "gemma2-softcap",
    "gpt_oss-sinks",
    "cohere2-interleaved-nope",
    "yarn",
)


@pytest.fixture(params=FAMILIES)
def family(request, tmp_path):
    loaded = loaded_model(request.param)
    settings = load_settings(state_dir=tmp_path, kv_slots=512, disk_space=0, prefix_cache="off")
    with LLM.from_model(loaded, settings) as llm:
        yield loaded, llm


def messages_of(llm, example):
    return [
        {
            "role": "user",
            "content": [*llm.generate_context_cache(example.passages), example.question],
        }
    ]


def test_a_full_prefill_shows_the_models_own_attention(family):
    loaded, llm = family
    messages = messages_of(llm, make_example())
    views = EngineInspector(llm, loaded).inspect(messages, "full")
    ids = torch.from_numpy(llm.chat_prompt(messages).tokens)[None]
    with attention_of(loaded.model, "eager"), torch.inference_mode():
        own = loaded.model(input_ids=ids, output_attentions=True).attentions
    assert len(views) == len(own) == len(loaded.layers)
    for view, expected in zip(views, own, strict=True):
        assert view.attention.shape[1] == LAST_QUERIES
        torch.testing.assert_close(
            view.attention, expected[0, :, -LAST_QUERIES:], rtol=1e-4, atol=1e-5
        )
        assert view.key.shape[1] == view.value.shape[1] == ids.shape[1]
    assert loaded.model.config._attn_implementation == ATTENTION_NAME


def test_linked_prompts_deviate_where_they_must(family):
    loaded, llm = family
    messages = messages_of(llm, make_example())
    cached = llm.chat_prompt(messages).cached
    inspector = EngineInspector(llm, loaded)
    full = inspector.inspect(messages, "full")
    views = {
        policy: inspector.inspect(messages, policy)
        for policy in ("full", "prefix", "random-50", "cacheblend-50", "query-50", "naive")
    }
    kv = {
        policy: relative_kv_distance(full, seen)[:, cached].mean(axis=1)
        for policy, seen in views.items()
    }
    attention = {policy: attention_deviation(full, seen) for policy, seen in views.items()}
    layers = len(loaded.layers)
    assert tuple(kv["full"]) == attention["full"] == (0.0,) * layers
    assert kv["naive"][0] < 1e-6  # first-layer KV depends on token and position alone
    assert attention["naive"][0] < 1e-6
    for layer in range(1, layers):
        assert kv["prefix"][layer] < 1e-5
        assert 1e-4 < kv["random-50"][layer] < kv["naive"][layer]
        assert attention["naive"][layer] > 1e-5
    for policy in ("cacheblend-50", "query-50"):  # one narrows between layers, one runs twice
        assert 1e-4 < kv[policy][-1] < kv["naive"][-1]


def test_few_fresh_tokens_are_not_mixed_with_recomputed_ones(family):
    loaded, llm = family
    messages = messages_of(llm, make_example(question="?"))
    prompt = llm.chat_prompt(messages)
    fresh = len(prompt) - prompt.spans[-1].end
    assert fresh < LAST_QUERIES
    inspector = EngineInspector(llm, loaded)
    full, lego = (inspector.inspect(messages, policy) for policy in ("full", "legolink-16"))
    assert full[0].attention.shape[1] == lego[0].attention.shape[1] == fresh
    assert attention_deviation(full, lego)[0] < 1e-6
