"""In vLLM's workers, chunks are placed beside the computation, which waits for each layer: on a
device that a CPU passes for."""

from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from tests.engines.embedded.conftest import linked_prompt
from tests.store.memory.fake_device import FakeArrival, FakeDevice

from kvlinker_vllm.protocol.steps import StartedTransfer, TransferSlice
from kvlinker_vllm.protocol.transfer_plan import TransferPlan, plan_capture
from kvlinker_vllm.worker import fused_placing, passes
from kvlinker_vllm.worker.layers import layer_launches
from kvlinker_vllm.worker.observing import QuestionObservation
from kvlinker_vllm.worker.passes import LanePlacing, Passes, TransferTask
from kvlinker_vllm.worker.recording import ChunkCapture
from vllm_tests.linked_vllm import LinkedVLLM, difference
from vllm_tests.worker.test_fused_placing import heads_last, placed, some_parts, worker

POLICIES = ["naive", "legolink-16", "random-30"]
TOLERANCE = 3e-5


@pytest.fixture
def device(monkeypatch):
    """What workers take for their device from now on, on which each layer is placed alone."""
    found = FakeDevice()
    monkeypatch.setattr(fused_placing, "LAYERS_AT_ONCE", 1)
    monkeypatch.setattr(passes, "lane_to", lambda _: found)
    return found


@pytest.fixture
def linked(device, tmp_path):
    made = LinkedVLLM("llama", tmp_path / "models", tmp_path / "state", num_gpu_blocks_override=64)
    yield made
    made.close()


def differences(linked):
    """How far answers are from transformers', by policy; slices of 64 tokens take several steps."""
    prompt = linked_prompt(97, 156, 61, header=5)
    linked.cache(prompt)
    return [
        difference(linked.answer(prompt, policy), prompt, policy, "llama") for policy in POLICIES
    ]


def test_answers_are_exact(linked, device):
    assert max(differences(linked)) < TOLERANCE
    linked.settle()
    layers = len(linked.runner.attn_groups[0][0].layer_names)
    launches = [line for line in device.log if line.startswith("launch")]
    assert launches
    assert len(launches) % layers == 0
    assert {line.replace("launch", "wait") for line in launches} <= set(device.log)


def test_answers_are_wrong_where_nobody_waits(linked, monkeypatch):
    """So that the test before would find a wait that is missing."""
    monkeypatch.setattr(FakeArrival, "wait", lambda self: None)
    assert min(differences(linked)) > 10 * TOLERANCE


def test_answers_are_wrong_where_layers_wait_too_late(linked, monkeypatch):
    """Behind a pass of kvlinker's own, placed KV takes the place of what the pass computed."""
    monkeypatch.setattr(LanePlacing, "wait_for", lambda self, name: None)

    def wait_for_all(self):
        for arrival in self._under_way.values():
            arrival.wait()
        self._under_way.clear()

    monkeypatch.setattr(LanePlacing, "wait_for_all", wait_for_all)
    naive, *repaired = differences(linked)
    assert naive < TOLERANCE
    assert min(repaired) > 10 * TOLERANCE


def test_each_layer_waits_for_its_own_parts_alone():
    _, layers = worker(heads_last)
    device, parts = FakeDevice(), [some_parts()]

    def launches(given):
        return layer_launches(layers, given)

    expected = placed(layers, launches(parts))
    for layer in layers:
        layer.module.kv_cache.fill_(7)
    placing = LanePlacing(device, layers, launches)
    placing.place(parts)
    assert all((layer.module.kv_cache == 7).all() for layer in layers)
    placing.wait_for("layer 1")
    assert torch.equal(layers[1].module.kv_cache, expected[1])
    assert (layers[2].module.kv_cache == 7).all()
    placing.wait_for("layer 1")
    placing.wait_for_all()
    assert [line for line in device.log if line.startswith("wait")] == [
        "wait 1",
        "wait 0",
        "wait 2",
        "wait 3",
    ]
    assert torch.equal(layers[3].module.kv_cache, expected[3])


def test_a_request_that_is_observed_shares_no_pass_with_captures(monkeypatch):
    """Its chunks may be placed within the one pass that it takes, which captures must not cut."""
    bound, layers = worker(heads_last)
    forwarded = []
    bound.forward = lambda sequences, **_: forwarded.append(sequences.lengths)
    bound.slots = lambda group, block_ids, positions: positions
    monkeypatch.setattr(passes, "fused_placing", lambda *_, **__: None)
    monkeypatch.setattr(passes, "record_attention", lambda *_, **__: nullcontext())
    made = Passes(bound, layers, tokens=64, runs=8, native=False)
    capture = ChunkCapture.__new__(ChunkCapture)
    observation = QuestionObservation.__new__(QuestionObservation)
    observation.unplaced = ()
    slices = []
    for plan, recorder in (
        (plan_capture("0" * 64, begin=0, end=40), capture),
        (TransferPlan(linked=48, runs=((0, 16), (16, 48)), measure="attention"), observation),
    ):
        started = StartedTransfer(
            plan.measure or "capture", plan, np.zeros(48, np.int64), ((1, 2, 3),), 0, waits=True
        )
        task = TransferTask(started, Future(), started.tokens, recorder)
        slices.append((task, TransferSlice(started.request_id, (), plan.runs, is_last=True)))
    made.compute(slices)
    assert forwarded == [[40], [16, 48]]
