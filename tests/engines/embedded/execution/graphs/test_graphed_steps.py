"""Steps by graphs are those of the model's modules, whoever else is in them: with a graph that a
CPU passes for, and kernels that Triton interprets."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kvlinker.engines.embedded.attention.triton_attention import TritonAttention
from kvlinker.engines.embedded.execution import runner
from kvlinker.engines.embedded.execution.compiling import program_error
from kvlinker.engines.embedded.execution.graphs import graphed_steps, step_graph
from kvlinker.engines.embedded.execution.layers_ahead import LayersAhead
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.recording.capturable import Capturable
from kvlinker.engines.embedded.model.recording.trace import UnrecordableError
from tests.engines.embedded.conftest import linked_prompt
from tests.engines.embedded.execution.graphs.fake_graph import FakeCapture
from tests.store.memory.fake_device import FakeDevice
from tests.toy_models import loaded_model

FAMILIES = [
    "llama",
    "gemma2-softcap",
    "gemma4-shared-two-sizes",
    "mistral-window",
    "cohere2-interleaved-nope",
    "gemma3n-shared",
    "diffllama-two-attentions",
    "gptj-interleaved-written-out",
]
PROMPTS = [linked_prompt(40, 33, 21, middle=3), linked_prompt(33, 40, fresh=5)]
POLICIES = ["full", "naive", "legolink-4", "query-10", "cacheblend-20"]


@pytest.fixture
def capture(monkeypatch):
    """What captures graphs, of runners whose attention Triton computes."""
    found = FakeCapture(monkeypatch)
    monkeypatch.setattr(runner, "choose_kernel", lambda *_, **__: TritonAttention())
    monkeypatch.setattr(graphed_steps, "GraphCapture", lambda: found)
    return found


def captured_model(family="llama"):
    """The model, to whose engine graphs are open."""
    loaded = loaded_model(family)
    return replace(loaded, program=Capturable.of(loaded.model, loaded.anatomy))


def graphed(made):
    return made.engine.runner.graphed


def answers(made, max_tokens=12):
    """The log probabilities of answers that are computed together, two by two."""
    for prompt in PROMPTS:
        made.cache(prompt)
    with made.held():
        outcomes = [
            made.submit(prompt, policy, max_tokens=max_tokens)[0]
            for policy in POLICIES
            for prompt in PROMPTS
        ]
    return [outcome.wait().logprobs for outcome in outcomes]


@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_are_the_modules(capture, family):
    loaded = loaded_model(family)
    found = Capturable.of(loaded.model, loaded.anatomy)
    assert program_error(loaded.model, loaded.anatomy, found) < 1e-5
    assert capture.captures == 1


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3_5-states", "do not keep states"),
        ("minicpm3-latents", "do not attend to latents"),
        ("mixtral-moe", "its experts wait"),
        ("dynamic-rope", "its rotary embedding waits"),
        ("longrope", "its rotary embedding waits"),
    ],
)
def test_what_graphs_do_not_compute_is_said(family, reason):
    loaded = loaded_model(family)
    with pytest.raises(UnrecordableError, match=reason):
        Capturable.of(loaded.model, loaded.anatomy)


def test_a_graph_that_cannot_be_captured_is_why_there_is_none(capture, monkeypatch):
    def fail(compute):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphed_steps, "GraphCapture", lambda: fail)
    loaded = loaded_model("llama")
    found = Capturable.of(loaded.model, loaded.anatomy)
    with pytest.raises(UnrecordableError, match=r"no graph can be captured \(operation not"):
        program_error(loaded.model, loaded.anatomy, found)


@pytest.mark.whole
def test_answers_are_those_without_graphs(bench, capture, monkeypatch):
    """Of requests that share their chunks, by every kind of policy; as answers grow, graphs are
    outgrown."""
    monkeypatch.setattr(step_graph, "SEGMENT_MINIMUM", 1)
    monkeypatch.setattr(step_graph, "TILE_MINIMUM", 1)
    made = bench(model=captured_model(), max_running=10)
    found = answers(made)
    assert graphed(made).replays > 0
    made = bench(max_running=10)
    for ours, theirs in zip(found, answers(made), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)
    assert graphed(made) is None


def test_a_step_goes_on_where_a_graph_cannot_be_captured(bench, capture, monkeypatch, caplog):
    def fail(compute):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(graphed_steps, "GraphCapture", lambda: fail)
    made = bench(model=captured_model())
    made.cache(PROMPTS[0])
    found = made.answer(PROMPTS[0], "naive", max_tokens=6)
    assert caplog.text.count("No more steps are captured as graphs: out of memory") == 1
    expected = bench().answer(PROMPTS[0], "naive", max_tokens=6)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)


def test_graphs_read_copies_of_chunks_once_they_are_there(bench, capture, monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(runner, "lane_to", lambda _: device)
    monkeypatch.setattr(runner, "_room_for_copies", lambda _: 1 << 30)
    made = bench(model=captured_model())
    made.cache(PROMPTS[0])
    device.forget()
    found = made.answer(PROMPTS[0], "naive", max_tokens=6)
    assert graphed(made).replays > 0
    launched = [line for line in device.log if line.startswith("launch")]
    assert len(launched) == len(made.loaded.layers), "copies stay from step to step"
    expected = bench().answer(PROMPTS[0], "naive", max_tokens=6)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)


class OutgrownGraph:
    """A graph that takes steps as often as it is told."""

    taken = 0

    def __init__(self, tables, layers, pool, outgrown):
        self.left = self.taken

    def takes(self, tables):
        self.left -= 1
        return self.left >= 0

    def computed(self, *_):
        return torch.zeros(1, 3)

    replayed = capture = computed


@pytest.mark.parametrize(("taken", "graphs"), [(0, 8), (31, 8), (32, 20)])
def test_a_size_is_captured_again_while_its_graphs_are_worth_it(monkeypatch, taken, graphs):
    """Later, its steps are left to the modules."""
    monkeypatch.setattr(graphed_steps, "StepGraph", OutgrownGraph)
    monkeypatch.setattr(OutgrownGraph, "taken", taken)
    loaded = loaded_model("llama")
    pool = KVPool(loaded.layers, 64, dtype=loaded.dtype, device=loaded.device)
    ahead = LayersAhead(None, len(pool.keys))
    steps = graphed_steps.GraphedSteps(
        Mock(), loaded.layers, [], pool, TritonAttention(), ahead, capture=Mock()
    )
    tables = Mock(size=step_graph.StepSize(1, 1, (0,)))
    found = [steps._computed(tables) for _ in range(20 * (taken + 1))]
    assert sum(each is not None for each in found) == graphs * (taken + 1)


def test_a_capture_teaches_no_speed(bench, capture, monkeypatch):
    made, noted = bench(model=captured_model()), []
    monkeypatch.setattr(
        made.engine._throughput, "note", lambda batch, seconds: noted.append(len(batch.slots))
    )
    made.answer(linked_prompt(9, fresh=5), "full", max_tokens=5)
    assert capture.captures == 1
    assert noted == [14, 1, 1, 1], "of the second step of one token, the time is the capture's"


def test_steps_whose_chunks_find_no_room_are_the_modules(bench, capture, monkeypatch):
    monkeypatch.setattr(runner, "lane_to", lambda _: FakeDevice())
    monkeypatch.setattr(runner, "_room_for_copies", lambda _: 0)
    made = bench(model=captured_model())
    made.cache(PROMPTS[0])
    made.answer(PROMPTS[0], "naive", max_tokens=6)
    assert not graphed(made).replays
