"""Steps into all places of a model at which it is intercepted. Where attention is not called but
written out, ``written_out.py`` follows it; ``states/stepping.py`` knows what changes states."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.model.indexers import IndexerCall, is_indexer
from kvlinker.engines.embedded.model.interception import Interceptor, replace, replace_by_names
from kvlinker.engines.embedded.model.states.stepping import step_into_layers, step_into_module
from kvlinker.engines.embedded.model.written_out import Followed

ROTARY_FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "apply_rotary_emb"

EXPANSION = "expand_kv"
"""The method by which attention with latents makes keys and values of them."""


def prepare(model: nn.Module) -> None:
    """Replace the rotary functions of all modeling modules that ``model`` is made of, their rules,
    and what expands latents. Idempotent.

    Functions of another form stay as they are.
    """
    kinds = {type(part) for part in model.modules()}
    for module in {sys.modules[kind.__module__] for kind in kinds}:
        for name in ROTARY_FUNCTIONS:
            if hasattr(module, name):
                _replace_rotary(module, name)
        step_into_module(module)
    for kind in kinds:
        if hasattr(kind, EXPANSION):
            replace(kind, EXPANSION, _left_latent)
        if is_indexer(kind) and "hidden_states" in signature(kind.forward).parameters:
            replace_by_names(kind, "forward", _index)
    step_into_layers(model)


def _replace_rotary(module: ModuleType, name: str) -> None:
    form = RotaryForm.of(getattr(module, name))
    if form is None:
        return
    writes_out = not hasattr(module, "ALL_ATTENTION_FUNCTIONS")

    def rotate(
        interceptor: Interceptor, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        rotated = interceptor.rotary(form, args, kwargs)
        if rotated is not None:
            return rotated
        unchanged = form.unchanged(args, kwargs)
        if not writes_out:
            return unchanged
        if isinstance(unchanged, Tensor):
            return unchanged.as_subclass(Followed)
        return tuple(each.as_subclass(Followed) for each in unchanged)

    replace(module, name, rotate)


def _left_latent(
    interceptor: Interceptor,
    original: Callable[..., Any],
    module: nn.Module,
    latent: Tensor,
    key: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pass the latent, and the key that all heads share, to attention as they are."""
    return key, latent


def _index(interceptor: Interceptor, original: Callable[..., Any], given: dict[str, Any]) -> Tensor:
    module = given.pop("self")
    return interceptor.index(IndexerCall(module, original, given))
