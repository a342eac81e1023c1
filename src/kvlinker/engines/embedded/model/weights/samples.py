"""Inputs of a model's linear layers and experts, by which it is chosen how each of them is
multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.weights.experts import ExpertsForm

SAMPLED_ROWS = 32
"""The largest number of rows of a layer's inputs that are kept, at equal distances in a pass."""


@contextmanager
def sampled_inputs(model: nn.Module) -> Iterator[Mapping[nn.Module, Tensor]]:
    """Keep inputs [rows, in_features], bf16, of each linear layer and each module of experts of
    ``model`` that runs in the block: some of its call with the most rows."""
    sampled: dict[nn.Module, Tensor] = {}
    most: dict[nn.Module, int] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            if type(module) is nn.Linear or ExpertsForm.of(module) is not None:
                sample = partial(_sample, sampled, most)
                hooks.enter_context(module.register_forward_pre_hook(sample))
        yield sampled


def _sample(
    sampled: dict[nn.Module, Tensor],
    most: dict[nn.Module, int],
    module: nn.Module,
    args: tuple[Any, ...],
) -> None:
    if not args:
        return
    rows = args[0].detach().reshape(-1, args[0].shape[-1])
    if len(rows) > most.get(module, 0):
        most[module] = len(rows)
        sampled[module] = rows[:: -(-len(rows) // SAMPLED_ROWS)].to("cpu", torch.bfloat16)
