"""Mixtures of experts whose weights native code multiplies by, in place of a model's own modules.

transformers has one form for experts of nearly all families: weights of all experts in one tensor,
with attributes that say how they lie, and a method that computes what is between the two products.
Modules of that form are found by these, not by the family, and each is compared with what takes its
place.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.model_files import expert_counts
from kvlinker.engines.embedded.model.memory import drop_mapped, return_freed
from kvlinker.engines.embedded.model.weights.matrices import BlockedMatrix, Matrix
from kvlinker.engines.embedded.model.weights.native_experts import (
    ExpertMatrices,
    native_experts,
    weighted_sum,
)
from kvlinker.engines.embedded.model.weights.native_quantized import (
    NativeInt4Matrix,
    NativeInt8Matrix,
)
from kvlinker.settings import WeightFormat

LARGEST_ERRORS: Mapping[WeightFormat, float] = {"int8": 0.05, "int4": 0.4}
"""‖ours − the module's‖ / ‖the module's‖ beyond which the module stays, where weights have fewer
bits than its own."""

LARGEST_ERROR = 1e-2
"""The same where they have as many; rounding to bf16 makes around 4e-3."""

CHECKED_ROWS = 16
"""The rows by which a module is compared, each with two experts."""

INPUTS = 32
"""The divisor of the number of inputs of matrices by which native code multiplies, in any number of
bits."""

MatrixKind = Callable[[Tensor, Tensor | None], Matrix]
"""Makes a matrix of a weight [outputs, inputs], and some of the inputs [rows, inputs] that it gets,
if there are any."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExpertsForm:
    """Says how a module's experts lie and what they compute: two products, and a function between
    them."""

    up: str
    """The name of the weight of the first product; ``down_proj`` is that of the second."""

    transposed: bool
    """True if weights are [experts, inputs, outputs], False if [experts, outputs, inputs]."""

    biased: bool

    @staticmethod
    def of(module: nn.Module) -> ExpertsForm | None:
        """Return the form of a module of experts; None if it is none, or of a form that is not
        known."""
        attributes = ("has_gate", "has_bias", "is_transposed")
        gated, biased, transposed = (getattr(module, name, None) for name in attributes)
        if not all(isinstance(each, bool) for each in (gated, biased, transposed)):
            return None
        form = ExpertsForm("gate_up_proj" if gated else "up_proj", bool(transposed), bool(biased))
        names = [name for name, each in module._parameters.items() if each is not None]
        return form if set(names) == set(form.names) else None

    @property
    def names(self) -> list[str]:
        """The names of all parameters."""
        names = [self.up, "down_proj"]
        return names + [f"{name}_bias" for name in names] if self.biased else names


class PackedExperts(nn.Module):
    """Computes what a module of experts does, by matrices that were made of its weights."""

    def __init__(
        self,
        module: nn.Module,
        form: ExpertsForm,
        kind: MatrixKind,
        sampled: Tensor | None = None,
    ) -> None:
        """``sampled`` are inputs of the module [rows, width], bf16, if ``kind`` wants some."""
        super().__init__()
        self._form = form
        holder: Any = module
        self._between = holder._apply_gate if holder.has_gate else holder.act_fn
        self.up = _matrices(module, form.up, form, kind, lambda expert: sampled)
        self.down = _matrices(
            module, "down_proj", form, kind, lambda expert: self._inner(sampled, expert)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each of ``hidden_states`` [rows,
        width]: [rows, width].

        ``top_k_index`` [rows, experts of a row] says which ones, by numbers; ``top_k_weights`` has
        the same shape.
        """
        chosen = top_k_index.reshape(-1).long()
        inner = self._between(self.up.multiply(hidden_states.bfloat16(), chosen))
        outputs = self.down.multiply(inner.bfloat16(), chosen)
        weights = top_k_weights.reshape(top_k_index.shape)
        return weighted_sum(outputs, weights).to(hidden_states.dtype)

    def _inner(self, rows: Tensor | None, expert: int) -> Tensor | None:
        """Return what the second product of one expert gets for ``rows`` [rows, width], if any."""
        if rows is None:
            return None
        chosen = torch.full((len(rows),), expert)
        inner: Tensor = self._between(self.up.multiply(rows, chosen))
        return inner.bfloat16()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        """Write what the module had written."""
        for name, matrices in ((self._form.up, self.up), ("down_proj", self.down)):
            dense = matrices.dense()
            weight = dense.transpose(1, 2).contiguous() if self._form.transposed else dense
            destination[f"{prefix}{name}"] = weight
            if matrices.biases is not None:
                destination[f"{prefix}{name}_bias"] = matrices.biases


@torch.no_grad()
def arrange_experts(model: Any, weights: WeightFormat, sampled: Mapping[nn.Module, Tensor]) -> None:
    """Put native code in the place of the experts of ``model`` on a CPU, with weights in the format
    ``weights``, where it computes the same; the log says why if it does not.

    Each module's weights are freed as soon as there are others. By weights in 8 bits, inputs in 8
    bits are multiplied where those ``sampled`` of a module can be rounded so.
    """
    if not next(model.parameters()).is_cpu:
        return
    counts = expert_counts(model.config)
    places = [
        (owner, name, module)
        for owner in model.modules()
        for name, module in owner.named_children()
        if any(_is_stack(weight, counts) for weight in module._parameters.values())
    ]
    stay: Counter[str] = Counter()
    for owner, name, module in places:
        reason = _put_packed(owner, name, module, weights, sampled.get(module))
        if reason is not None:
            stay[reason] += 1
    for reason, count in stay.items():
        logger.info("PyTorch multiplies by the experts of %d layers: %s.", count, reason)


def _is_stack(weight: Tensor | None, counts: Collection[int]) -> bool:
    """Return whether a weight has a matrix for each expert."""
    return weight is not None and weight.dim() == 3 and len(weight) in counts


def _put_packed(
    owner: nn.Module, name: str, module: nn.Module, weights: WeightFormat, sampled: Tensor | None
) -> str | None:
    """Put packed experts in the place of ``module``; return why not, as the end of a sentence."""
    form = ExpertsForm.of(module)
    if form is None:
        return f"native code does not know the form of {type(module).__name__}"
    stacks = [getattr(module, each) for each in (form.up, "down_proj")]
    kind = MATRICES.get(weights, _blocked)
    if kind is _blocked and any(stack.dtype != torch.bfloat16 for stack in stacks):
        return f"they are in {str(stacks[0].dtype).removeprefix('torch.')}"
    if any(stack.shape[1 if form.transposed else 2] % INPUTS for stack in stacks):
        return f"their inputs are no multiple of {INPUTS}"
    if torch.cpu._is_amx_tile_supported():
        return "oneDNN does so by AMX"
    if native_experts() is None:
        return "there is no native code for this machine"
    packed = PackedExperts(module, form, kind, sampled if weights == "int8" else None)
    error = _difference(packed, module, len(stacks[0]))
    most = LARGEST_ERRORS.get(weights, LARGEST_ERROR)
    if not error <= most:
        return f"native code differs from {type(module).__name__} by {error:.1e}, more than {most}"
    setattr(owner, name, packed)
    module._parameters.clear()
    for stack in stacks:
        drop_mapped(stack)
    del stack, stacks
    return_freed()
    return None


def _difference(packed: PackedExperts, module: nn.Module, experts: int) -> float:
    """Return ‖ours − the module's‖ / ‖the module's‖ for random rows."""
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    width = packed.up.width
    hidden = torch.randn(CHECKED_ROWS, width, generator=generator).to(weight.dtype)
    first = torch.arange(CHECKED_ROWS) * experts // CHECKED_ROWS
    chosen = torch.stack([first, (first + 1) % experts], dim=1)
    shares = torch.rand(chosen.shape, generator=generator).to(weight.dtype)
    ours, expected = (each(hidden, chosen, shares).float() for each in (packed, module))
    return float((ours - expected).norm() / expected.norm())


def _matrices(
    module: nn.Module,
    name: str,
    form: ExpertsForm,
    kind: MatrixKind,
    inputs: Callable[[int], Tensor | None],
) -> ExpertMatrices:
    """Return the matrices of a module's weight of this name; ``inputs`` has some of each expert."""
    stack: Tensor = getattr(module, name)
    biases = getattr(module, f"{name}_bias").bfloat16().contiguous() if form.biased else None
    matrices = [
        kind(weight.T.contiguous() if form.transposed else weight, inputs(expert))
        for expert, weight in enumerate(stack.unbind())
    ]
    return ExpertMatrices(matrices, biases)


def _blocked(weight: Tensor, inputs: Tensor | None) -> Matrix:
    return BlockedMatrix(weight)


def _in_4_bits(weight: Tensor, inputs: Tensor | None) -> Matrix:
    return NativeInt4Matrix(weight)


MATRICES: Mapping[WeightFormat, MatrixKind] = {"int8": NativeInt8Matrix, "int4": _in_4_bits}
"""The functions that make matrices in fewer than 16 bits."""
