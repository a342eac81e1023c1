"""Finds the modules that native code calls whole: those in which layers keep a state, or attend to
latents."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.anatomy import Anatomy
from kvlinker.engines.embedded.model.indexers import IndexerCall
from kvlinker.engines.embedded.model.interception import Interceptor, intercepted
from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall
from kvlinker.engines.embedded.model.states.rules import RuleCall


@torch.inference_mode()
def called_modules(model: Any, anatomy: Anatomy) -> set[nn.Module]:
    """Return the modules whose own code convolves tokens with those before, applies a rule to a
    state, or attends to latents. Runs a pass of one token, where there may be any."""
    finder = _Finder(anatomy)
    if not anatomy.recurrences and not any(layer.latents for layer in anatomy.layers):
        return finder.found
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(finder.enter))
        handles.append(module.register_forward_hook(finder.leave))
    try:
        with intercepted(finder):
            model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    return finder.found


class _Finder(Interceptor):
    """Notes the module that computes when a state or latents are asked for."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.found: set[nn.Module] = set()
        self._layers = iter(anatomy.layers)
        self._computing: list[nn.Module] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        self._computing.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._computing.pop()

    def convolve(self, call: ConvolutionCall) -> Tensor:
        self.found.add(self._computing[-1])
        return torch.zeros_like(call.hidden)

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        self.found.add(self._computing[-1])
        output, state = call.scan(call.mixed, call.gates, None)
        return output, state if call.wants_state else None

    def index(self, call: IndexerCall) -> Tensor:
        return call.nothing()

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        latents = next(self._layers).latents
        if latents is not None:
            self.found.add(self._computing[-1])
        width = value.shape[3] if latents is None else latents.value_dim
        return query.new_zeros(1, query.shape[2], query.shape[1], width)
