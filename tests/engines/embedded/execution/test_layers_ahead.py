"""Chunks that lie in the host's memory are copied to a device ahead of the layers that attend to
them, and waited for: on a device that a CPU passes for."""

import numpy as np
import pytest
import torch

from kvlinker.base.types.chunks import chunk_key
from kvlinker.engines.embedded.execution import layers_ahead, runner
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.store import HostTier
from kvlinker.store.chunk_kv import ChunkKV, LayerKV
from kvlinker.store.memory.lane import lane_to
from tests.engines.embedded.conftest import linked_prompt
from tests.store.memory.fake_device import FakeArrival, FakeDevice

PROMPT = linked_prompt(40, 33, 21, middle=3)
POLICIES = ["naive", "legolink-4", "query-10", "cacheblend-20", "cachecraft-1-focus-w1"]
FAMILIES = ["llama", "gemma3n-shared", "deepseek_v3-latents-interleaved"]


@pytest.fixture
def device(monkeypatch):
    """What engines take for their device from now on."""
    found = FakeDevice()
    monkeypatch.setattr(runner, "lane_to", lambda _: found)
    return found


def answers(made, policies=POLICIES):
    made.cache(PROMPT)
    return [made.answer(PROMPT, policy, max_tokens=3).logprobs for policy in policies]


@pytest.mark.parametrize(
    ("family", "room"), [("llama", 1 << 30), *((family, 0) for family in FAMILIES)]
)
def test_answers_are_those_of_chunks_that_need_no_copy(bench, device, monkeypatch, family, room):
    monkeypatch.setattr(runner, "_room_for_copies", lambda _: room)
    copied = answers(bench(family))
    assert any(line.startswith("launch") for line in device.log)
    monkeypatch.setattr(runner, "lane_to", lane_to)
    assert copied == answers(bench(family))


@pytest.mark.parametrize("policy", POLICIES)
def test_answers_are_wrong_where_nobody_waits(bench, device, monkeypatch, policy):
    """So that the tests here would find a wait that is missing."""
    monkeypatch.setattr(FakeArrival, "wait", lambda self: None)
    made = bench()
    made.cache(PROMPT)
    outcome = made.submit(PROMPT, policy, max_tokens=2)[0].wait()
    assert outcome.failed is not None or not np.isfinite(outcome.logprobs).all()


def test_layers_are_copied_before_their_turn(bench, device, monkeypatch):
    monkeypatch.setattr(layers_ahead, "AHEAD", 1)
    made = bench(changes={"num_hidden_layers": 4})
    made.cache(PROMPT)
    device.forget()
    made.answer(PROMPT, "naive", max_tokens=1)
    assert device.log == [
        *("launch 0", "launch 1", "wait 0"),
        *("launch 2", "wait 1"),
        *("launch 3", "wait 2"),
        "wait 3",
    ]


@pytest.mark.parametrize("layers", [2, 6])
def test_layers_that_share_kv_in_turn_copy_it_once(layers):
    device = FakeDevice()
    kv = ChunkKV(tuple(LayerKV(*torch.randn(2, 2, 9, 16)) for _ in range(layers)))
    ahead = LayersAhead(device, layers)
    ahead.begin_pass()
    last = layers - 1
    for index in (*range(layers), last - 1, last, last - 1):
        (layer,) = ahead.layer([kv], index)
        assert torch.equal(layer.key, kv.layers[index].key)
    assert sum(line.startswith("launch") for line in device.log) == layers


def test_copies_stay_for_the_next_tokens_as_long_as_there_is_room(bench, device, monkeypatch):
    monkeypatch.setattr(runner, "_room_for_copies", lambda _: 1 << 30)
    made = bench(changes={"num_hidden_layers": 4})
    made.cache(PROMPT)
    device.forget()
    made.answer(PROMPT, "naive", max_tokens=5)
    assert sorted(device.log) == sorted(
        f"{what} {n}" for what in ("launch", "wait") for n in range(4)
    )
    made.answer(linked_prompt(9, seed=5), "full", max_tokens=1)  # needs none of them
    device.forget()
    made.answer(PROMPT, "naive", max_tokens=1)
    assert len(device.log) == 8


def test_chunks_whose_layers_still_arrive_are_copied_as_they_come(bench, device, monkeypatch):
    made = bench(slower=lambda events: [HostTier(1 << 28, events, name="slow")])
    (first,) = answers(made, ["naive"])
    made.store.flush()
    for chunk in PROMPT.chunks:
        key = chunk_key(chunk, fingerprint=made.engine.fingerprint, tenant="default")
        made.store._tiers[0].delete(key)
    assert made.answer(PROMPT, "naive", max_tokens=3).logprobs == first
