"""Native code for ARM's processors, run by an emulator: the same checks as on this machine's."""

import pytest
import torch

from kvlinker.engines.embedded.attention.kernel_check import require_right
from kvlinker.engines.embedded.attention.native_kernel import NativeAttention
from kvlinker.engines.embedded.attention.position_scores import NativeDots
from kvlinker.engines.embedded.model.norms import FORMS, NativeNorm, native_norm
from kvlinker.engines.embedded.model.states.delta_rule import delta_rule
from kvlinker.engines.embedded.model.weights.native_products import GroupedProducts, load_products
from kvlinker.engines.native.targets import TARGETS
from tests.engines.embedded.attention.scenes import Shape, linked, make_scene
from tests.engines.embedded.attention.test_native_kernel import check
from tests.engines.embedded.emulated import build, emulated
from tests.engines.embedded.execution.test_observing import check as check_weights
from tests.engines.embedded.execution.test_observing import scene_of
from tests.engines.embedded.model.states.test_delta_rule import FUNCTIONS
from tests.engines.embedded.model.states.test_delta_rule import call as call_of_rule
from tests.engines.native.test_placing import check as check_placing
from tests.engines.native.test_placing import columns, rows

pytestmark = [pytest.mark.whole, pytest.mark.usefixtures("native_anew")]

ARM = [target for target in TARGETS if target.name.startswith("neon")]


@pytest.fixture(scope="module", params=ARM, ids=[target.name for target in ARM])
def program(request, tmp_path_factory):
    return build(request.param, tmp_path_factory.mktemp("emulated")), request.param


@pytest.fixture
def processor(program):
    with emulated(*program):
        yield


@pytest.mark.usefixtures("processor")
def test_products_with_weights_of_every_form():
    load_products()  # compares them
    GroupedProducts()


@pytest.mark.usefixtures("processor")
def test_products_of_few_queries_and_keys():
    NativeDots()  # compares them


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize(
    "variant",
    [
        {"softcap": 30.0, "window": 50},
        {"sinks": True, "pairing": "interleaved", "rotated": 10, "factor": 1.37},
    ],
    ids=str,
)
def test_attention(variant):
    kernel = NativeAttention()
    require_right(kernel, torch.bfloat16, torch.device("cpu"))
    chunks = [100, 37, 60]
    for behind in (1, 70):
        prompt = linked([0, 1, 2, 1], chunks, before=5, behind=behind, recompute=16)
        check(kernel, make_scene(chunks, [prompt, prompt], Shape(**variant), dtype=torch.bfloat16))


@pytest.mark.usefixtures("processor")
def test_weights_of_attention():
    check_weights(NativeAttention(), scene_of({"window": 70, "sinks": True}, 16, 40), 0, 50)


@pytest.mark.usefixtures("processor")
def test_norms():
    for form in FORMS:
        check_norm(form)


def check_norm(form):
    norm = torch.nn.RMSNorm(70, eps=1e-6, dtype=torch.bfloat16)
    torch.nn.init.normal_(norm.weight)
    hidden = torch.randn(3, 70).bfloat16()
    normed = torch.nn.functional.rms_norm(hidden.float(), (70,), eps=1e-6)
    normed = normed.bfloat16().float() if form.rounds_first else normed
    found = NativeNorm(norm, form, 1e-6)(hidden)
    assert native_norm() is not None
    expected = normed * (norm.weight.float() + form.offset)
    torch.testing.assert_close(found.float(), expected, rtol=0.01, atol=0.01)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_delta_rule(function):
    given, states = call_of_rule(True, tokens=3, rows=21, columns=80, function=function)
    rule = delta_rule(given, states.shape[1:], torch.device("cpu"))
    assert rule is not None  # it was compared with the model's function
    output, _ = rule(given.mixed, given.gates, list(states))
    expected, _ = given.scan(given.mixed, given.gates, states)
    torch.testing.assert_close(output, expected, atol=2e-5, rtol=1e-5)


@pytest.mark.usefixtures("processor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_placing(dtype):
    for turns in ("pairs", "halves"):
        check_placing((columns, rows), turns, dtype)
