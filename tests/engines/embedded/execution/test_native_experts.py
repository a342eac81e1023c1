"""Models with experts answer by native code as by their own modules, whoever shares their steps."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from kvlinker.engines.embedded.execution import compiling
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, VisibleKV
from kvlinker.engines.embedded.execution.compiling import program_error
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model.recording.program import ModuleCall, Program
from kvlinker.engines.embedded.model.weights.experts import PackedExperts
from kvlinker.engines.embedded.model.weights.native_experts import native_experts
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.engines.embedded.conftest import linked_prompt
from tests.toy_models import tiny_model

pytestmark = pytest.mark.skipif(
    native_experts() is None or torch.cpu._is_amx_tile_supported(),
    reason="experts are PyTorch's to multiply here",
)

TOKENS = 12


@pytest.mark.parametrize("family", ["mixtral-moe", "gpt_oss-sinks"])
def test_answers_are_the_same(bench, family):
    """Several policies at once, forks, and so few slots that some are preempted, beside each
    request alone and the same in fp32. Where two tokens are all but equal, or two experts, bf16
    decides, so that answers are compared as far as they go together, and most have to be equal."""
    loaded, exact = (
        prepare_model(tiny_model(family).to(dtype), byte_tokenizer())
        for dtype in (torch.bfloat16, torch.float32)
    )
    found = [isinstance(each, PackedExperts) for each in loaded.model.modules()]
    assert sum(found) == len(loaded.layers)
    assert loaded.computes_steps == "compiled"
    prompt, short = linked_prompt(30, 25, header=5), linked_prompt(20, seed=1)
    policies = ["naive", "legolink-4", "full", "query-10", "cacheblend-20"]

    def answers(model, *, together):
        made = bench(model=model, kv_slots=256, max_step_tokens=512)
        made.cache(prompt)
        if not together:
            asked = [made.answer(prompt, policy, max_tokens=TOKENS) for policy in policies]
            return [*asked, made.answer(short, "full", max_tokens=TOKENS)]
        with made.held():
            submitted = [made.submit(prompt, policy, max_tokens=TOKENS)[0] for policy in policies]
            submitted += made.submit_choices(short, 2, temperature=0, max_tokens=TOKENS)[0]
        return [each.wait() for each in submitted][: len(policies) + 1]

    batch, alone = (answers(loaded, together=together) for together in (True, False))
    for others, bound in ((alone, 0.03), (answers(exact, together=False), 0.1)):
        near = 0
        for ours, expected in zip(batch, others, strict=True):
            for one, other, *logprobs in zip(
                ours.tokens, expected.tokens, ours.logprobs, expected.logprobs, strict=True
            ):
                near += logprobs[0] == pytest.approx(logprobs[1], abs=bound)
                if one != other:
                    break
        assert near >= 0.6 * TOKENS * len(batch)


@pytest.mark.parametrize("family", ["mixtral-moe", "gpt_oss-sinks"])
@pytest.mark.parametrize("weights", ["auto", "int8", "int4"])
def test_steps_are_those_of_the_modules(family, weights):
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer(), weights=weights)
    assert isinstance(loaded.program, Program), loaded.program
    calls = [each for each in loaded.program.operations if isinstance(each, ModuleCall)]
    assert len(calls) == len(loaded.layers)
    assert program_error(loaded.model, loaded.anatomy, loaded.program) <= 5e-3


def test_a_step_raises_what_its_experts_raise():
    loaded = prepare_model(tiny_model("mixtral-moe").bfloat16(), byte_tokenizer())
    pool = KVPool(loaded.layers, 64, dtype=loaded.dtype, device=loaded.device)
    assert isinstance(loaded.program, Program), loaded.program
    runner = Runner(loaded.model, loaded.anatomy, pool, program=loaded.program)
    own = np.arange(20)
    visible: dict[object, VisibleKV] = {
        0: VisibleKV((), (SlotSpan(0, 20),), own, OwnTokens(own, ()))
    }
    batch = Batch((Run(own, 0, own + 3, True, owner=0),), visible)
    expected = runner.step(batch).logits[0]
    experts = [each for each in loaded.model.modules() if isinstance(each, PackedExperts)][1]
    handle = experts.register_forward_pre_hook(Mock(side_effect=MemoryError("no memory left")))
    with pytest.raises(MemoryError, match="no memory left"):
        runner.step(batch)
    handle.remove()
    assert torch.equal(runner.step(batch).logits[0], expected)


def test_passes_that_are_compared_choose_the_same_experts(monkeypatch):
    """A router is moved between them so that others would be chosen."""
    loaded = prepare_model(tiny_model("mixtral-moe").bfloat16(), byte_tokenizer())
    assert isinstance(loaded.program, Program), loaded.program
    passes = []
    compute = compiling._computed

    def computed(model, *args):
        for name, weight in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                weight.data.neg_()
        passes.append(args[-1])
        return compute(model, *args)

    monkeypatch.setattr(compiling, "_computed", computed)
    error = program_error(loaded.model, loaded.anatomy, loaded.program)
    assert error <= compiling.LARGEST_ERROR
    assert passes[:2] == [loaded.program, None]
