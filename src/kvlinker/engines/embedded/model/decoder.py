"""Finds a model's decoder layers."""

from __future__ import annotations

from torch import nn


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's decoder layers: the modules in its lists that have attention or a state,
    and are in no other of them."""
    found: list[nn.Module] = []
    for part in model.modules():  # a layer comes before its parts
        if isinstance(part, nn.ModuleList) and not any(part in layer.modules() for layer in found):
            found += [each for each in part if _mixes_tokens(each)]
    return found


def _mixes_tokens(module: nn.Module) -> bool:
    return any(hasattr(part, "layer_idx") for part in module.modules())
