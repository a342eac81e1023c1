"""Finds what the engine must know of a model's layers by watching one small forward pass: no family
code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from kvlinker.engines.contract.cost import AttentionShape
from kvlinker.engines.embedded.model.interception import (
    ATTENTION_NAME,
    EXPANSION,
    RotaryFunction,
    attention_of,
    cos_and_sin,
    intercepted,
    prepare,
)
from kvlinker.engines.embedded.model.latents import Latents
from kvlinker.engines.embedded.model.obstacles import (
    EXHAUSTED,
    LOOKED_AT,
    Obstacle,
    has_indexer,
    holds_state,
    obstacle_of,
    refusal,
    rotary_modules,
)
from kvlinker.engines.embedded.model.rotary import Rotary

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles change once a sequence passes the length that the model was
pretrained with."""

QUERY_SCALING = "llama_4_scaling_beta"
"""The rotary parameter by which queries beyond the length that the model was pretrained with are
scaled."""


@dataclass(frozen=True, slots=True)
class LayerShape(AttentionShape):
    """Describes one layer's attention.

    Where it keeps latents, its key is the one that all heads share, its value the latent.
    """

    rotary: Rotary | None
    """How its keys are rotated; None where it has no rotary embedding."""

    latents: Latents | None = None
    """How it attends to latents; None where it keeps keys and values."""

    @property
    def expanded_values_per_token(self) -> int:
        """The number of values that one token's KV would have here if it were not latents."""
        latents = self.latents
        return self.values_per_token if latents is None else latents.expanded_values_per_token

    @property
    def operations_per_pair(self) -> int:
        if self.latents is not None:
            return self.latents.operations_per_pair
        return super(LayerShape, self).operations_per_pair


def trace_layers(model: Any) -> tuple[LayerShape, ...]:
    """Return the shape of every attention layer, in layer order.

    Raises UnsupportedModelError when a layer's attention or positions do not pass through the two
    places that kvlinker steps into, or when a layer keeps more than keys and values.
    """
    transformers_logging.set_verbosity_error()
    prepare(model)
    device = model.get_input_embeddings().weight.device
    positions = torch.arange(LOOKED_AT, device=device)[None]
    tracer = _Tracer(context_window(model))
    try:
        with (
            _watch_rotary_modules(model, tracer),
            attention_of(model, ATTENTION_NAME),
            intercepted(tracer),
            torch.inference_mode(),
        ):
            ids = positions % model.config.get_text_config().vocab_size
            stateful = holds_state(model(input_ids=ids, position_ids=positions, use_cache=True))
    except EXHAUSTED:
        raise
    except Exception as error:  # whatever the model's code raises
        otherwise = Obstacle.ATTENTION_FORM if tracer.saw_rotation else Obstacle.ROTARY_FORM
        raise refusal(model, obstacle_of(model, otherwise)) from error
    if stateful:
        raise refusal(model, Obstacle.STATE)
    if has_indexer(model):
        raise refusal(model, Obstacle.SELECTION)
    expected = model.config.get_text_config().num_hidden_layers
    if sorted(tracer.layers) != list(range(expected)):
        raise refusal(
            model,
            obstacle_of(model, Obstacle.ATTENTION_FORM),
            f"It has {expected} layers; attention with keys and values was seen in layers"
            f" {sorted(tracer.layers)}.",
        )
    if all(layer.rotary is None for layer in tracer.layers.values()):
        raise refusal(model, obstacle_of(model, Obstacle.ROTARY_FORM))
    return tuple(tracer.layers[index] for index in range(expected))


def context_window(model: Any) -> int:
    """Count the positions that the model is made for, and over which it computes the same
    everywhere: neither its rotary embedding nor the scale of its queries changes.

    Raises UnsupportedModelError where its configuration does not say.
    """
    config = model.config.get_text_config()
    if getattr(config, "max_position_embeddings", None) is None:
        raise refusal(model, obstacle_of(model, Obstacle.WINDOW))
    window = int(config.max_position_embeddings)
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE or parameters.get(QUERY_SCALING):
            window = min(window, int(parameters.get("original_max_position_embeddings") or window))
    return window


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the model's decoder layers, in order."""
    wanted = set(range(model.config.get_text_config().num_hidden_layers))  # type: ignore
    return next(
        part
        for part in model.modules()
        if isinstance(part, nn.ModuleList)
        and {getattr(each, "layer_idx", None) for each in part.modules()} - {None} == wanted
    )


class _Tracer:
    """Records, for every layer, its shapes and the rotary embedding that preceded its attention."""

    def __init__(self, window: int) -> None:
        self._window = window
        self.layers: dict[int, LayerShape] = {}
        self._tables: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._kinds: dict[tuple[int, str, int], Rotary] = {}
        self._pending: Rotary | None = None

    @property
    def saw_rotation(self) -> bool:
        """Tells if any layer has rotated its queries and keys in the form that is known."""
        return bool(self._kinds)

    def saw_tables(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        self._tables.append((cos_and_sin(output)[0], module, args, kwargs))

    def rotary(
        self, apply: RotaryFunction, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> None:
        for table, module, args, kwargs in reversed(self._tables):
            if table is cos or (table.shape == cos.shape and torch.equal(table, cos)):
                constants = repr(
                    [a for a in (*args, *kwargs.values()) if not isinstance(a, Tensor)]
                )
                identity = (id(module), constants, key.shape[-1])
                if identity not in self._kinds:
                    self._kinds[identity] = Rotary(
                        module, args, kwargs, apply, width=key.shape[-1], longest=self._window
                    )
                self._pending = self._kinds[identity]
                return
        raise LookupError("the tables of cos and sin come from no rotary embedding module")

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
    ) -> Tensor:
        index = getattr(module, "layer_idx", None)
        if not isinstance(index, int):
            raise LookupError(f"{type(module).__name__} does not say which layer it belongs to")
        latents = Latents.of(module, query, key) if hasattr(module, EXPANSION) else None
        self.layers[index] = LayerShape(
            query_heads=query.shape[1],
            kv_heads=key.shape[1],
            key_dim=key.shape[-1],
            value_dim=value.shape[-1],
            rotary=self._pending,
            latents=latents,
        )
        self._pending = None
        width = value.shape[-1] if latents is None else latents.value_dim
        return query.new_zeros(1, query.shape[2], query.shape[1], width)


@contextmanager
def _watch_rotary_modules(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        tracer.saw_tables(module, args, kwargs, output)

    handles = [part.register_forward_hook(hook, with_kwargs=True) for part in rotary_modules(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
