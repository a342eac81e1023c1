"""Engines place what the device tier gives, and no such tier is made where the device is the
CPU."""

import pytest
import torch

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.events import ChunkLookup
from kvlinker.doors.http.metrics import Metrics
from kvlinker.llm import LLM
from kvlinker.store import ContextCache, DeviceTier
from tests.doors.http.serving import tiny_model, tiny_settings
from tests.engines.embedded.conftest import linked_prompt


@pytest.mark.parametrize("family", ["llama", "deepseek_v3-latents-interleaved"])
def test_answers_are_the_same_from_the_device(bench, family):
    made = bench(family, device=lambda events: DeviceTier(1 << 28, torch.device("cpu"), events))
    seen = []
    made.events.subscribe(
        lambda event: seen.append(event.tier) if isinstance(event, ChunkLookup) else None
    )
    prompt = linked_prompt(40, 33, middle=3)
    made.cache(prompt)
    answers = [made.answer(prompt, "legolink-4") for _ in range(2)]
    assert seen == ["host", "host", "device", "device"]
    assert answers[0].logprobs == answers[1].logprobs


def test_figures_tell_of_the_device_as_of_other_tiers(tmp_path, monkeypatch):
    budget = property(lambda configured: configured.setup.settings.device_memory)
    monkeypatch.setattr("kvlinker.store.tiers.device.ConfiguredDevice.budget_bytes", budget)
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path, device_memory=1 << 20)) as llm:
        metrics = Metrics(llm)
        llm.events.subscribe(metrics.count)
        (cache,) = llm.generate_context_cache(["The kettle stands in the kitchen."])
        prompt: list[str | ContextCache] = [cache, "Where?"]
        assert llm.caches.tier(cache) == "host"
        llm.completion(prompt, max_tokens=1)
        assert llm.caches.tier(cache) == "device"
        llm.completion(prompt, max_tokens=1)
        said = metrics.exposition().decode()
        used = llm.store.usage()[0].used_bytes
        assert used > 0
    assert f'kvlinker:store_bytes{{tier="device"}} {float(used)}' in said
    assert 'kvlinker:chunk_lookups_total{result="hit",tier="device"} 1.0' in said


def test_a_device_tier_on_the_cpu_is_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match="host_memory"):
        LLM.from_model(tiny_model(), tiny_settings(tmp_path, device_memory=1000))
    with LLM.from_model(tiny_model(), tiny_settings(tmp_path)) as llm:
        assert [tier.name for tier in llm.store.usage()] == ["host", "disk"]
