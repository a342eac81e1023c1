"""Native norms are those of the model, whatever its way of scaling; others stay as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from kvlinker.engines import native
from kvlinker.engines.embedded.model.norms import (
    UNEQUAL_LIMIT,
    NativeNorm,
    native_norm,
    quicken_norms,
)

pytestmark = pytest.mark.skipif(native_norm() is None, reason="no native norms")


TWO_STEPS = 2**-6
"""The relative error of two roundings to bf16, which a norm does one after the other."""


def trained(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for weight in norm.parameters():
        weight.data = 1 + 0.3 * torch.randn(weight.shape, generator=generator)
    return norm.bfloat16()


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm, Olmo2RMSNorm])
@pytest.mark.parametrize("width", [24, 64, 1024])
@torch.inference_mode()
def test_norms_are_the_models_own(kind: type[nn.Module], width: int) -> None:
    norm = trained(kind(width, 1e-5))
    plain = copy.deepcopy(norm)
    quicken_norms(norm)
    assert isinstance(norm.forward, NativeNorm)
    for shape in ((1, 1, width), (3, 70, width), (1, 40, 4, width)):
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(2)).bfloat16()
        found, expected = norm(hidden), plain(hidden)
        torch.testing.assert_close(found, expected, rtol=TWO_STEPS, atol=1e-6)
        assert (found != expected).float().mean() <= UNEQUAL_LIMIT
        turned = hidden.transpose(0, 1)
        assert torch.equal(norm(turned), found.transpose(0, 1))
    assert norm(torch.randn(2, width)).dtype == torch.float32
    assert norm.state_dict().keys() == plain.state_dict().keys()


class OddRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
    """Does something of its own."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * 1.1


class OtherRMSNorm(LlamaRMSNorm):  # type: ignore[misc]
    """Hides its epsilon."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__(width, epsilon)
        self.variance_epsilon = torch.tensor(epsilon)


@pytest.mark.parametrize("kind", [OddRMSNorm, OtherRMSNorm, nn.LayerNorm])
def test_other_norms_stay_as_they_are(kind: type[nn.Module]) -> None:
    norm = trained(kind(64, 1e-5))
    quicken_norms(norm)
    assert "forward" not in vars(norm)


def test_other_precisions_stay_as_they_are() -> None:
    norm = LlamaRMSNorm(64)
    quicken_norms(norm)
    assert "forward" not in vars(norm)


@pytest.mark.usefixtures("native_anew")
def test_without_a_compiler_norms_are_the_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(source: object, target: object) -> None:
        raise native.NativeUnavailableError("no compiler")

    monkeypatch.setattr(native, "load_library", missing)
    norm = trained(LlamaRMSNorm(64))
    with caplog.at_level("INFO"):
        quicken_norms(norm)
    assert "forward" not in vars(norm)
    assert caplog.text.count("no compiler") == 1
