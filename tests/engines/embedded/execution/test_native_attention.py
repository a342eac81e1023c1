import numpy as np
import pytest
import torch

from kvlinker.engines import native
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.execution.batch import Batch, OwnTokens, Run, VisibleKV
from kvlinker.engines.embedded.execution.runner import Runner
from kvlinker.engines.embedded.kv_cache.pool import KVPool, SlotSpan
from kvlinker.engines.embedded.model_loading import prepare_model
from kvlinker.engines.native import NativeUnavailableError
from kvlinker.quality.bench.harness.shapes import byte_tokenizer
from tests.engines.embedded.conftest import linked_prompt
from tests.toy_models import tiny_model


@pytest.fixture(scope="session")
def kernel():
    try:
        return NativeAttention()
    except NativeUnavailableError as error:
        pytest.skip(f"no native attention: {error}")


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral-window",
        "gemma2-softcap",
        "gpt_oss-sinks",
        "deepseek_v3-latents-interleaved",
        "minicpm3-latents",
    ],
)
def test_models_answer_as_with_torch(kernel, native_anew, family):
    loaded = prepare_model(tiny_model(family).bfloat16(), byte_tokenizer())
    tokens = np.random.default_rng(0).integers(3, 256, 200)
    parts = [(0, 90), (120, 121), (130, 140), (199, 200)]

    def logits(native_attention):
        pool = KVPool(loaded.layers, 420, dtype=loaded.dtype, device=loaded.device)
        for tensor in (*pool.keys, *pool.values):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)))
        runner = Runner(loaded.model, loaded.anatomy, pool, native_attention=native_attention)
        assert isinstance(runner.kernel, NativeAttention) == native_attention
        runs = [
            Run(slot + np.arange(begin, end), begin, tokens[begin:end], end == 200, owner=slot)
            for slot in (0, 210)
            for begin, end in parts
        ]
        own = np.arange(200)
        visible_kv: dict[object, VisibleKV] = {
            slot: VisibleKV((), (SlotSpan(slot, 200),), own, OwnTokens(own, ()))
            for slot in (0, 210)
        }
        result = runner.step(Batch(tuple(runs), visible_kv))
        assert list(result.logits) == [0, 210]
        return torch.stack(list(result.logits.values()))

    ours, torchs = logits(True), logits(False)
    assert (ours - torchs).norm() <= 5e-2 * torchs.norm()


@pytest.mark.parametrize("weights", ["auto", "int4"])
def test_a_model_can_do_without_native_code(bench, native_anew, monkeypatch, weights):
    """The weights' products, norms, attention and the products that observers see are all PyTorch's
    then."""
    monkeypatch.setattr(native, "functions", lambda *_: pytest.fail("native code is loaded"))
    loaded = prepare_model(
        tiny_model("llama").bfloat16(), byte_tokenizer(), weights=weights, native=False
    )
    made = bench(model=loaded, native="off")
    prompt = linked_prompt(30, 20)
    made.cache(prompt)
    assert made.answer(prompt, "query-10", max_tokens=2).failed is None
