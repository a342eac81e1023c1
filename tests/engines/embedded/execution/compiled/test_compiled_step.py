"""Steps by native code are those of the model's modules, whoever else is in them."""

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from kvlinker.engines.contract.observation import QuestionProbe
from kvlinker.engines.embedded.attention.kernels import native_attention
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.torch_kernels import TorchAttention
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.execution.capturing import Capture
from kvlinker.engines.embedded.execution.compiled.bound_program import (
    BoundModule,
    BoundProgram,
    NativeStep,
)
from kvlinker.engines.embedded.execution.compiled.compiled_step import (
    FIRST_ROWS,
    ROW_LIMIT,
    CompiledStep,
    step_function,
)
from kvlinker.engines.embedded.kv_cache.pool import KVPool
from kvlinker.engines.embedded.model.recording.program import (
    Buffer,
    Calculation,
    Kind,
    ModuleCall,
    Place,
    Product,
    Program,
)
from kvlinker.engines.embedded.model.weights import arrangement
from kvlinker.engines.embedded.model.weights.matrices import BlockedMatrix, PackedMatrix, packs
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.engines.embedded.conftest import linked_prompt
from tests.engines.embedded.execution.batches import prompt_batch, runner_of
from tests.toy_models import tiny_model

pytestmark = [
    pytest.mark.skipif(native_attention() is None, reason="no native attention"),
    pytest.mark.usefixtures("without_amx"),
]

FUNCTIONS = {
    Kind.COPY: lambda x: x.clone(),
    Kind.SILU: F.silu,
    Kind.GELU: F.gelu,
    Kind.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Kind.RELU: F.relu,
    Kind.TANH: torch.tanh,
    Kind.SIGMOID: torch.sigmoid,
    Kind.RSQRT: lambda x: x.abs().rsqrt(),
    Kind.ROOT: lambda x: x.abs().sqrt(),
    Kind.SQUARE: lambda x: x**2,
    Kind.CUBE: lambda x: x**3,
    Kind.NEGATE: torch.neg,
    Kind.MEAN: lambda x: x.mean(-1, keepdim=True),
    Kind.LAYER_NORM: lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [5, 64, 100])
@pytest.mark.parametrize("kind", FUNCTIONS, ids=lambda kind: kind.name)
def test_operations_are_pytorchs(kind, width, dtype):
    generator = torch.Generator().manual_seed(0)
    rows = 3
    given = (3 * torch.randn(rows, width, generator=generator)).to(dtype)
    given[0] *= 1e-3
    if kind in (Kind.ROOT, Kind.RSQRT):
        given = given.abs()
    expected = FUNCTIONS[kind](given)
    size = expected.shape[1]
    wide = dtype is torch.float32
    output = Place(0, 0, size, 0, 1, wide)
    one = Place(given, 0, width, 0, 1, wide)
    operation = Calculation(kind, True, 1, width, output, one, epsilon=1e-5)
    buffers = (Buffer(size * dtype.itemsize, True),)
    bound = BoundProgram(Program((operation,), buffers, output, size, ()), [], [], _pool(), rows)
    operations = ctypes.addressof(bound.operations)
    step_function()(NativeStep(operations=operations, count=1, rows=rows, wanted=rows, threads=1))
    relative = 1e-5 if wide else 2**-7
    torch.testing.assert_close(bound.logits(rows), expected.float(), rtol=relative, atol=1e-6)


def _pool():
    return KVPool((), 1, dtype=torch.bfloat16, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def llama():
    return prepare_model(tiny_model("llama").bfloat16(), byte_tokenizer())


def test_tied_embeddings_are_read_from_the_heads_blocks(monkeypatch):
    monkeypatch.setattr(arrangement, "SPARE_SHARE", 1.0)
    model = tiny_model("llama", tie_word_embeddings=True).bfloat16()
    weight = model.lm_head.weight.detach().clone()
    tied = prepare_model(model, byte_tokenizer())
    assert isinstance(tied.program, Program), tied.program
    calculations = (each for each in tied.program.operations if isinstance(each, Calculation))
    (first,) = (each for each in calculations if each.kind is Kind.GATHER_BLOCKS)
    ids = np.arange(len(weight))
    output = Place(0, 0, first.inner, 0, 1, False)
    program = Program(
        (replace(first, output=output),), (Buffer(2 * first.inner, False),), output, 1, ()
    )
    bound = BoundProgram(program, [], [], _pool(), len(ids))
    step = NativeStep(
        operations=ctypes.addressof(bound.operations),
        count=1,
        rows=len(ids),
        ids=ids.ctypes.data,
        threads=1,
    )
    step_function()(step)
    assert torch.equal(bound._rows_at(output)[: len(ids)], weight)
    compiled, plain = (
        runner_of(tied, compiled=each).step(prompt_batch(40, 7)).logits for each in (True, False)
    )
    for one, other in zip(compiled.values(), plain.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02)


@pytest.mark.skipif(not packs(torch.bfloat16, torch.device("cpu")), reason="oneDNN packs no bf16")
def test_weights_that_onednn_packs_are_recorded(monkeypatch):
    """As on processors that multiply bf16 themselves; their memory cannot be asked for."""
    monkeypatch.setattr(BlockedMatrix, "takes", lambda weight, native: False)
    loaded = prepare_model(tiny_model("llama").bfloat16(), byte_tokenizer())
    assert any(isinstance(module, PackedMatrix) for module in loaded.model.modules())
    assert isinstance(loaded.program, Program), loaded.program


@pytest.mark.skipif(not packs(torch.bfloat16, torch.device("cpu")), reason="oneDNN packs no bf16")
@pytest.mark.parametrize(
    ("family", "weights"), [("llama", "auto"), ("phi3", "auto"), ("qwen3", "int4")]
)
def test_with_amx_native_steps_call_onednn_and_the_modules_pytorchs_attention(
    family, weights, monkeypatch
):
    monkeypatch.setattr(BlockedMatrix, "takes", lambda weight, native: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer(), weights=weights)
    assert isinstance(loaded.program, Program), loaded.program
    kinds = {each.weights.form for each in loaded.program.operations if isinstance(each, Product)}
    assert kinds <= {"plain"}  # such as small ones
    assert any(isinstance(each, ModuleCall) for each in loaded.program.operations)
    runner = runner_of(loaded)
    assert isinstance(runner.kernel, TorchAttention)
    taken = []
    compute = runner._compiled.compute

    def spied(batch):
        taken.append(compute(batch))
        return taken[-1]

    monkeypatch.setattr(runner._compiled, "compute", spied)
    compiled, modules = (
        each.step(prompt_batch(40, 7)).logits
        for each in (runner, runner_of(loaded, compiled=False))
    )
    assert len(taken) == 1
    assert taken[0] is not None
    for ours, expected in zip(compiled.values(), modules.values(), strict=True):
        assert (ours - expected).norm() <= 2e-2 * expected.norm()


def test_logits_are_near_the_models_own_in_fp32(llama):
    (logits,) = runner_of(llama).step(prompt_batch(40)).logits.values()
    ids = torch.from_numpy(prompt_batch(40).tokens)[None]
    with torch.inference_mode():
        expected = tiny_model("llama")(input_ids=ids).logits[0, -1]
    assert (logits - expected).norm() <= 3e-2 * expected.norm()


def test_more_rows_than_there_is_memory_for_get_more(llama):
    runner, modules = runner_of(llama), runner_of(llama, compiled=False)
    for size in (3, FIRST_ROWS + 1, ROW_LIMIT, 2):
        batch = prompt_batch(size)
        (ours,), (expected,) = (each.step(batch).logits.values() for each in (runner, modules))
        assert (ours - expected).norm() <= 5e-3 * expected.norm(), size


def test_company_changes_nothing_but_last_bits(llama):
    alone = runner_of(llama).step(prompt_batch(30)).logits[0]
    beside = runner_of(llama).step(prompt_batch(30, 50, 1, 7)).logits[0]
    assert (alone - beside).norm() <= 5e-3 * alone.norm()


def test_no_logits_are_wanted(llama):
    batch = prompt_batch(20)
    silent = Batch(tuple(replace(run, wants_logits=False) for run in batch.runs), batch.visible_kv)
    runner, modules = runner_of(llama), runner_of(llama, compiled=False)
    assert runner.step(silent).logits == {}
    modules.step(silent)
    for ours, expected in zip(runner.pool.keys, modules.pool.keys, strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gpt_oss-sinks", "minicpm3-latents", "qwen3_5-states"]
)
def test_observers_see_the_attention_of_modules(family):
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    assert isinstance(loaded.program, Program), loaded.program
    plain = prompt_batch(40, 7, 21)
    probes, logits = [], []
    for compiled in (True, False):
        runs = tuple(
            replace(
                run,
                observer=QuestionProbe(np.zeros((len(loaded.layers), len(run.tokens)), np.float32)),
            )
            if run.owner != 1
            else run
            for run in plain.runs
        )
        runner = runner_of(loaded, compiled=compiled)
        batch = Batch(runs, plain.visible_kv)
        assert not compiled or runner._compiled.takes(batch)
        logits.append(runner.step(batch).logits)
        probes.append([run.observer.attention for run in runs if run.observer is not None])
    unobserved = runner_of(loaded).step(plain).logits
    for owner, expected in unobserved.items():
        assert torch.equal(logits[0][owner], expected), "observers change nothing"
    for ours, expected in zip(*probes, strict=True):
        assert ours.any(axis=1).any()
        np.testing.assert_allclose(ours, expected, atol=2e-2)
        np.testing.assert_allclose(ours.sum(axis=1), expected.sum(axis=1), atol=2e-2)


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "gemma3",
        "gemma4-shared-two-sizes",
        "gpt_oss-sinks",
        "minicpm3-latents",
        "qwen3_5-states",
    ],
)
def test_the_kv_that_is_captured_is_the_modules(family):
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    assert isinstance(loaded.program, Program), loaded.program
    plain = prompt_batch(40, 7, 21)
    found, logits = [], []
    for compiled in (True, False):
        captures = [
            Capture(
                loaded.anatomy, [(2, len(run.tokens) - 1)], dtype=torch.bfloat16, first_tokens=1
            )
            for run in plain.runs
        ]
        runs = tuple(
            replace(run, capture=capture) for run, capture in zip(plain.runs, captures, strict=True)
        )
        runner = runner_of(loaded, compiled=compiled)
        batch = Batch(runs, plain.visible_kv)
        assert not compiled or runner._compiled.takes(batch)
        logits.append(runner.step(batch).logits)
        found.append([kv for capture in captures for kv in capture.finish()])
    uncaptured = runner_of(loaded).step(plain).logits
    for owner, expected in uncaptured.items():
        assert torch.equal(logits[0][owner], expected), "captures change nothing"
    pairs = 0
    for ours, expected in zip(*found, strict=True):
        for part, other in zip(_tensors(ours), _tensors(expected), strict=True):
            pairs += 1
            assert other.norm() > 0
            assert (part - other).norm() < 2e-2 * other.norm()
    assert pairs >= 2 * len(plain.runs)


def _tensors(kv):
    for layer in kv.layers:
        yield from layer.parts
    for state in kv.states:
        yield state.mixed
        yield from state.effect or ()


class _Unready:
    """An observer that is shown what was not computed."""

    def observe(self, *_: object) -> None:
        raise AssertionError("a module failed before")


def test_a_module_that_fails_fails_its_step_alone_before_observers_are_shown_more(monkeypatch):
    loaded = prepare_model(tiny_model("qwen3_5-states").bfloat16(), byte_tokenizer())
    runner, batch = runner_of(loaded), prompt_batch(9)
    observed = Batch((replace(batch.runs[0], observer=_Unready()),), batch.visible_kv)
    held = runner._compiled._whole.bound._held
    module = next(each for each in held if isinstance(each, BoundModule))
    with monkeypatch.context() as patches:
        patches.setattr(module, "_call", lambda _: int("no memory"))
        with pytest.raises(ValueError, match="no memory"):
            runner.step(observed)
    assert runner.step(batch).logits[0].isfinite().all()


def test_steps_that_are_watched_are_the_modules(llama, monkeypatch):
    taken = []
    monkeypatch.setattr(CompiledStep, "compute", lambda self, batch: taken.append(batch))
    runner = runner_of(llama)
    runner.step(prompt_batch(5))
    assert len(taken) == 1
    batch = prompt_batch(5)
    for changes in ({"refinement": object()}, {"logprobs": object()}):
        watched = Batch((replace(batch.runs[0], **changes),), batch.visible_kv)
        assert not runner._compiled.takes(watched)
    assert not runner._compiled.takes(prompt_batch(ROW_LIMIT, 1))
    runner.kernel = NativeAttention()  # one that a laboratory puts in its place
    runner.step(prompt_batch(5))
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("family", "weights", "bound"),
    [
        ("qwen3", "auto", 0.08),
        ("qwen3", "int8", 0.15),
        ("qwen3", "int4", 0.2),
        ("qwen3_5-states", "auto", 0.1),
        ("granite-states-nope", "auto", 0.15),
        ("minicpm3-latents", "auto", 0.1),
    ],
)
def test_answers_are_the_same(bench, family, weights, bound, monkeypatch):
    """Several policies at once, forks, and so few slots that some are preempted. Where two tokens
    are all but equal, bf16 decides, so that answers are compared as far as they go together; which
    requests share a step depends on time, and so does what is rounded."""
    steps, compute = [], CompiledStep.compute

    def counted(self, batch):
        steps.append(len(batch.tokens))
        return compute(self, batch)

    monkeypatch.setattr(CompiledStep, "compute", counted)
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer(), weights=weights)
    assert loaded.computes_steps == "compiled"
    prompt, short = linked_prompt(30, 25, header=5), linked_prompt(20, seed=1)
    policies = ["naive", "legolink-4", "full", "query-10", "cacheblend-20"]

    def answers(model):
        made = bench(model=model, kv_slots=256, max_step_tokens=512)
        made.cache(prompt)
        with made.held():
            asked = [made.submit(prompt, policy, max_tokens=12)[0] for policy in policies]
            asked += made.submit_choices(short, 2, temperature=0, max_tokens=12)[0]
            cancelled, handle = made.submit(short, "naive", max_tokens=40)
        handle.cancel()
        assert cancelled.wait().finished.reason == "cancelled"
        return [each.wait() for each in asked]

    compiled = answers(loaded)
    assert sum(size < 10 for size in steps) >= 12, "tokens behind the prompts are steps of few"
    steps.clear()
    modules = answers(replace(loaded, program="for comparison"))
    assert not steps
    compared = 0
    for ours, expected in zip(compiled, modules, strict=True):
        pairs = zip(ours.tokens, expected.tokens, strict=True)
        equal = next((place for place, (one, other) in enumerate(pairs) if one != other), 12)
        same = slice(equal + 1)
        assert ours.logprobs[same] == pytest.approx(expected.logprobs[same], abs=bound)
        compared += equal
    assert compared >= 12 * len(compiled) / 2
