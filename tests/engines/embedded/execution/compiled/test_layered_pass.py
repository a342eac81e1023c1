"""A pass some layers at a time computes what a whole one does, whatever is computed in between."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvlinker.engines.contract.attention import AttentionOptions
from kvlinker.engines.contract.observation import QuestionProbe
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.execution.batch import Batch, StepResult, VisibleKV
from kvlinker.engines.embedded.execution.compiled.compiled_step import (
    ROW_LIMIT,
    CompiledStep,
    LayeredPass,
)
from kvlinker.engines.embedded.execution.compiling import _batch
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.model.recording.program import (
    Calculation,
    HeadsPlace,
    Kind,
    Place,
    Program,
    RecordedAttention,
)
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.engines.embedded.scheduling.composition import LayeredPieces
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.engines.embedded.conftest import linked_prompt
from tests.engines.embedded.execution.batches import prompt_batch, runner_of
from tests.toy_models import tiny_model

pytestmark = [
    pytest.mark.skipif(native_attention() is None, reason="no native attention"),
    pytest.mark.usefixtures("without_amx"),
]


def filled(runner):
    """A runner whose slots hold garbage."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*runner.pool.keys, *runner.pool.values):
        tensor.copy_(100 * torch.randn(tensor.shape, generator=generator))
    return runner


def later(batch, slots):
    """The batch in other slots, so many behind."""
    runs = tuple(
        replace(run, slots=run.slots + slots, owner=("later", run.owner)) for run in batch.runs
    )
    visible: dict[object, VisibleKV] = {
        ("later", owner): replace(
            seen, spans=tuple(span._replace(slot=span.slot + slots) for span in seen.spans)
        )
        for owner, seen in batch.visible_kv.items()
    }
    return Batch(runs, visible)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "mixtral-moe", "gemma4-shared-two-sizes", "phi3"]
)
def test_what_is_computed_in_parts_is_the_whole_to_the_bit(family):
    """Windows, sinks, experts, shared KV, and chunks before scattered runs, beside steps of
    others of more rows and fewer."""
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    assert isinstance(loaded.program, Program), loaded.program
    batch = _batch(loaded.model, loaded.anatomy)
    expected_runner, runner = filled(runner_of(loaded)), filled(runner_of(loaded))
    expected = expected_runner.step(batch).logits
    assert runner.accepts_layers(batch)
    parts, done, sizes = 0, None, [3, 100, 1, 40]
    while done is None:
        runner.step(later(prompt_batch(sizes[parts % len(sizes)]), 1000))
        done = runner.compute_layers(batch, until=0.0)
        parts += 1
    assert parts == len(loaded.layers) + 1
    result, seconds = done
    assert seconds > 0
    assert result.logits.keys() == expected.keys()
    for owner, logits in expected.items():
        assert torch.equal(result.logits[owner], logits)
    for ours, whole in zip(
        (*runner.pool.keys, *runner.pool.values),
        (*expected_runner.pool.keys, *expected_runner.pool.values),
        strict=True,
    ):
        assert torch.equal(ours[:, :1000], whole[:, :1000])


@pytest.fixture(scope="module")
def llama():
    return prepare_model(tiny_model("llama").bfloat16(), byte_tokenizer())


def test_another_batch_takes_the_place_of_one_that_is_not_done(llama):
    runner, batch = filled(runner_of(llama)), prompt_batch(30)
    expected = filled(runner_of(llama)).step(batch).logits[0]
    larger = prompt_batch(ROW_LIMIT)
    assert runner.compute_layers(larger, until=0.0) is None
    for _ in range(2):
        assert runner.compute_layers(batch, until=0.0) is None
        runner.drop_layers()
    result, _ = runner.compute_layers(batch, until=float("inf"))
    assert torch.equal(result.logits[0], expected)


def test_who_asks_for_states_or_is_watched_is_computed_whole(llama):
    runner = runner_of(llama)
    batch = prompt_batch(9)
    assert runner.accepts_layers(batch)
    assert runner.most_layered_tokens == ROW_LIMIT
    probe = QuestionProbe(np.zeros((len(llama.layers), 9), np.float32))
    for changes in ({"observer": probe}, {"capture": object()}, {"logprobs": object()}):
        watched = Batch((replace(batch.runs[0], **changes),), batch.visible_kv)
        assert not runner.accepts_layers(watched)
    assert not runner.accepts_layers(prompt_batch(ROW_LIMIT, 1))
    modules = runner_of(llama, compiled=False)
    assert not modules.accepts_layers(batch)
    assert modules.most_layered_tokens == 0
    for family in ("qwen3_5-states", "minicpm3-latents"):
        loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
        assert not runner_of(loaded).accepts_layers(batch)
        assert runner_of(loaded).most_layered_tokens == 0


@pytest.mark.parametrize(
    ("until", "parts"), [(0.0, [1, 1, 1, 1, 1]), (12.5, [1, 4]), (1e9, [5]), (23.0, [2, 3])]
)
def test_parts_go_on_while_half_of_the_next_one_should_be_done_in_time(until, parts):
    """A part takes 10 seconds; the second call may take as long as it wants."""
    now, computed = 0.0, []

    def compute(begin, end):
        nonlocal now
        now += 10.0
        computed.append((begin, end))

    place = Place(0, 0, 1, 0, 1, False)
    heads = HeadsPlace(0, 0, 1, 1, 1, 1)
    attention = RecordedAttention(0, heads, heads, heads, heads, AttentionOptions(1.0, None, None))
    copy = Calculation(Kind.COPY, False, 1, 1, place, place)
    program = Program((copy, attention) * 4 + (copy, copy), (), place, 1, ())
    done = StepResult({}, {}, {})
    layered = LayeredPass(program, compute, lambda: done, clock=lambda: now)
    found: list[int] = []
    result = None
    while result is None:
        before = len(computed)
        result = layered.compute_layers(until if not found or until == 0.0 else 1e9)
        found.append(len(computed) - before)
    assert found == parts
    assert result is done
    assert layered.seconds == 50
    assert computed == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10)]


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_answers_are_the_same_beside_requests_that_decode(bench, family, monkeypatch):
    """Several policies, forks, preemption and a cancel, while a neighbour decodes: all prompts by
    pieces, and none."""
    monkeypatch.setattr(LayeredPieces, "_size", lambda *_: 40)
    begun, begin = [], CompiledStep.begin

    def counted(self, batch):
        begun.append(len(batch.tokens))
        return begin(self, batch)

    monkeypatch.setattr(CompiledStep, "begin", counted)
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    prompt, other = linked_prompt(30, 25, header=40), linked_prompt(20, header=60, seed=1)
    policies = ["naive", "legolink-4", "full"]

    def answers():
        made = bench(model=loaded, kv_slots=400, max_step_tokens=512)
        made.cache(prompt)
        neighbour, stop = made.submit(linked_prompt(20, seed=2), "full", max_tokens=100)
        while len(neighbour.tokens) < 5:  # so that steps which only decode are measured
            neighbour.wait_for_token()
        asked = [made.submit(prompt, policy, max_tokens=8)[0] for policy in policies]
        asked += made.submit_choices(other, 2, temperature=0, max_tokens=8)[0]
        cancelled, handle = made.submit(prompt, "full", max_tokens=40)
        handle.cancel()
        found = [each.wait() for each in asked]
        cancelled.wait()
        stop.cancel()
        neighbour.wait()
        return found

    layered = answers()
    assert sum(begun) >= 100
    begun.clear()
    monkeypatch.setattr(Runner, "accepts_layers", lambda self, batch: False)
    whole = answers()
    assert not begun
    for ours, expected in zip(layered, whole, strict=True):
        pairs = zip(ours.tokens, expected.tokens, strict=True)
        equal = next((place for place, (one, two) in enumerate(pairs) if one != two), 8)
        same = slice(equal + 1)
        np.testing.assert_allclose(ours.logprobs[same], expected.logprobs[same], atol=0.1)
        assert equal >= 1
