"""Weights of a GGUF file in a model of transformers, before and where native code does not compute
with them: they become numbers only while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._pytree import tree_map

from kvlinker.engines.contract.grouped_codes import Placed, read_grouped
from kvlinker.engines.contract.model_place import weight_files
from kvlinker.engines.embedded.model.weights.native_quantized import GroupedMatrix

aten = torch.ops.aten

SAME = (aten.detach.default, aten.alias.default)
"""The functions that return the weight that they are given."""

_ARE_SKIPPED = ContextVar("_ARE_SKIPPED", default=False)


@contextmanager
def skipped_products() -> Iterator[None]:
    """Let products by coded weights be zero in the block, for passes that are watched for their
    structure alone: to read all codes would take most of their time."""
    token = _ARE_SKIPPED.set(True)
    try:
        yield
    finally:
        _ARE_SKIPPED.reset(token)


class CodedWeight(Tensor):
    """A weight [outputs, inputs] in bf16 that has the memory of its codes alone. PyTorch's
    functions take it as any other, and compute the numbers that they need of it each time."""

    # What is computed from a weight is none.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    content: Tensor
    """The file with the codes."""

    place: Placed
    matrix: GroupedMatrix

    @staticmethod
    def __new__(cls, content: Tensor, place: Placed) -> CodedWeight:
        """Take the weight that lies at ``place`` in ``content``, a file of grouped weights."""
        weight: CodedWeight = Tensor._make_wrapper_subclass(
            cls, place.shape, dtype=torch.bfloat16, device=torch.device("cpu")
        )
        weight.content, weight.place = content, place
        weight.matrix = GroupedMatrix(content, [place])
        return weight

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CodedWeight({self.place})"

    def rows(self, part: slice) -> Tensor:
        """Return a part of the weight's rows: [rows, inputs]."""
        return self.matrix.rows(torch.arange(len(self))[part])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, CodedWeight):
            if func in SAME:
                with torch.inference_mode(False):  # it is as much a weight as the first
                    return CodedWeight(first.content, first.place)
            if func is aten.embedding.default:
                ids = args[1]
                return first.matrix.rows(ids.flatten()).view(*ids.shape, -1)
        if func is aten.linear.default and _ARE_SKIPPED.get():
            inputs, weight, *_ = args
            return inputs.new_zeros(*inputs.shape[:-1], len(weight))
        return func(*tree_map(_dense, args), **tree_map(_dense, dict(kwargs or {})))


def _dense(given: Any) -> Any:
    return given.matrix.dense() if isinstance(given, CodedWeight) else given


def coded_weights(folder: Path) -> dict[str, Tensor] | None:
    """Return all weights of the model in ``folder`` by name, those in codes as such; None where no
    weights are."""
    grouped = read_grouped(folder)
    if grouped is None:
        return None
    weights = {
        name: part for file in weight_files(folder) for name, part in load_file(file).items()
    }
    return weights | {
        name: CodedWeight(grouped.content, place) for name, place in grouped.places.items()
    }
