"""Finds the structure of a model's layers by watching one small forward pass: no family code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging as transformers_logging

from kvlinker.engines.contract.removed_models import refuse_removed
from kvlinker.engines.contract.rotary_forms import RotaryForm
from kvlinker.engines.embedded.model.anatomy import Anatomy, LayerShape
from kvlinker.engines.embedded.model.bounds import context_window, scale_queries_alike
from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.indexers import (
    PICKED_BEFORE,
    Indexer,
    IndexerCall,
    Queries,
    all_visible,
    place_of,
)
from kvlinker.engines.embedded.model.interception import (
    ATTENTION_NAME,
    Interceptor,
    active_interceptor,
    attention_of,
    intercepted,
)
from kvlinker.engines.embedded.model.latents import Latents
from kvlinker.engines.embedded.model.obstacles import (
    EXHAUSTED,
    LOOKED_AT,
    ROUNDING,
    Obstacle,
    has_indexer,
    obstacle_of,
    refusal,
    rotary_modules,
    states_held,
)
from kvlinker.engines.embedded.model.precision import in_fp32
from kvlinker.engines.embedded.model.preparing import EXPANSION, prepare
from kvlinker.engines.embedded.model.rotary import Rotary, cos_and_sin
from kvlinker.engines.embedded.model.states.recurrence import (
    ConvolutionCall,
    Recurrence,
    tensors_held,
)
from kvlinker.engines.embedded.model.states.rules import RuleCall
from kvlinker.engines.embedded.model.weights.coded import skipped_products


def anatomy_of(model: Any) -> Anatomy:
    """Look at the model's layers.

    Raises UnsupportedModelError when a layer's attention or positions do not pass through the
    places that kvlinker steps into, when a layer keeps something else, and for a family that
    kvlinker no longer links.
    """
    refuse_removed(model.config)
    transformers_logging.set_verbosity_error()
    prepare(model)
    scale_queries_alike(model)
    tracer = _Tracer(model, context_window(model))
    try:
        states = _looked_at(model, tracer)
    except EXHAUSTED:
        raise
    except Exception as error:  # whatever the model's code raises
        otherwise = Obstacle.ATTENTION_FORM if tracer.saw_rotation else Obstacle.ROTARY_FORM
        raise refusal(model, obstacle_of(model, otherwise)) from error
    if tensors_held(tracer.recurrences) != states:
        raise refusal(model, obstacle_of(model, Obstacle.STATE))
    if has_indexer(model) and all(layer.picker is None for layer in tracer.layers):
        raise refusal(model, Obstacle.SELECTION)
    with_attention = {layer.block for layer in tracer.layers}
    whole = with_attention == set(range(tracer.blocks)) or tracer.recurrences
    if not whole or not (tracer.layers or tracer.recurrences):
        raise refusal(
            model,
            obstacle_of(model, Obstacle.ATTENTION_FORM),
            f"It has {tracer.blocks} layers; attention with keys and values was seen in"
            f" {len(with_attention)} of them.",
        )
    positionless = all(layer.rotary is None for layer in tracer.layers)
    if positionless and not tracer.recurrences:
        raise refusal(model, obstacle_of(model, Obstacle.ROTARY_FORM))
    return Anatomy(
        tuple(tracer.layers),
        tuple(tracer.recurrences),
        tracer.blocks,
        mingles=not with_attention.isdisjoint(tracer.with_state),
        called=frozenset(tracer.called),
    )


def _looked_at(model: Any, tracer: _Tracer) -> int:
    """Watch a forward pass by ``tracer``; return the number of states that the model's own cache
    holds after it."""
    device = model.device
    positions = torch.arange(LOOKED_AT, device=device)[None]
    with (
        _watched(model, tracer),
        attention_of(model, ATTENTION_NAME),
        intercepted(tracer),
        skipped_products(),
        torch.inference_mode(),
    ):
        output = model(
            input_ids=positions % model.config.get_text_config().vocab_size,
            attention_mask=all_visible(LOOKED_AT, device) if has_indexer(model) else None,
            position_ids=positions,
            use_cache=True,
        )
    return states_held(output)


class _Tracer(Interceptor):
    """Records, for every layer, its shapes and the rotary embedding that preceded its attention."""

    def __init__(self, model: Any, window: int) -> None:
        self._model = model
        self._window = window
        self.layers: list[LayerShape] = []
        self.blocks = 0
        self.recurrences: list[Recurrence] = []
        self.with_state: set[int] = set()
        self.called: set[nn.Module] = set()
        self.computing: list[nn.Module] = []
        self._convolution: ConvolutionCall | None = None
        self._convolved = 0
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._tables: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._kinds: dict[tuple[object, ...], Rotary] = {}
        self._own: PassTables | None = None
        self._pending: Rotary | None = None
        self._turned: Tensor | None = None
        self._indexer: Indexer | None = None
        self._linking = False
        self._picker: int | None = None

    @property
    def saw_rotation(self) -> bool:
        """True if any layer has rotated its queries and keys in a known form."""
        return bool(self._kinds)

    def saw_tables(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        self._tables.append((cos_and_sin(output)[0], module, args, kwargs))

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._linking:  # what an indexer makes of all that is kept
            return
        apply, key, cos, _ = form.rotation(args, kwargs)
        width = key.shape[-1]
        module, inputs, options = self._source(cos)
        constants = repr([a for a in (*inputs, *options.values()) if not isinstance(a, Tensor)])
        identity = (id(module), form.function, constants, width)
        if identity not in self._kinds:
            self._kinds[identity] = Rotary(
                module, inputs, options, apply, width=width, longest=self._window
            )
        self._pending = self._kinds[identity]
        self._turned = key

    def index(self, call: IndexerCall) -> Tensor:
        """Note what the indexer keeps of tokens, and what of that it rotates."""
        if not call.is_known:
            raise LookupError("an indexer is called in another form")
        before, self._pending, self._turned = self._pending, None, None

        def linked(kept: Tensor) -> Tensor:
            offset = None if self._turned is None else place_of(self._turned[0, 0], kept)
            rotary = None if offset is None else self._pending
            tables = self._pending if call.makes_masks else None
            self._indexer = Indexer(kept.shape[-1], rotary, offset or 0, tables)
            self._linking = True
            return kept

        everything = torch.arange(LOOKED_AT)
        call.picked(Queries(None, everything.numpy(), everything, everything), linked)
        if self._indexer is None:
            raise LookupError("an indexer keeps nothing that a cache is handed")
        self._pending, self._linking = before, False
        return call.nothing()

    def _picked_by(self, module: nn.Module | None) -> int | None:
        """Return the layer whose indexer picks for the attention whose turn it is."""
        if self._indexer is not None:
            self._picker = len(self.layers)
        elif not getattr(module, PICKED_BEFORE, False):
            return None
        return self._picker

    def _source(self, cos: Tensor) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """Return what made a table, and what it was called with."""
        for table, *call in reversed(self._tables):
            if table is cos or (table.shape == cos.shape and torch.equal(table, cos)):
                return tuple(call)
        if rotary_modules(self._model):
            raise LookupError("the tables of cos and sin come from no rotary embedding module")
        if self._own is None:
            self._own = PassTables(self._model, self._window)
        positions = torch.arange(cos.shape[1], device=cos.device)[None]
        if not torch.allclose(self._own(positions)[0].to(cos.dtype), cos, atol=ROUNDING):
            raise LookupError("layers rotate by different tables")
        return self._own, (positions,), {}

    def attend(
        self,
        module: nn.Module | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        latents = Latents.of(module, query, key) if module and hasattr(module, EXPANSION) else None
        same_key = [index for index, (seen, _) in enumerate(self._seen) if seen is key]
        same = [index for index in same_key if self._seen[index][1] is value]
        if self._pending is None and same_key:
            self._pending = self.layers[same_key[0]].rotary
        self._seen.append((key, value))
        width = value.shape[-1] if latents is None else latents.value_dim
        if latents is not None:
            self.called.add(self.computing[-1])
            key, value = latents.kept(key, value)
        self.layers.append(
            LayerShape(
                query_heads=query.shape[1],
                kv_heads=key.shape[1],
                key_dim=key.shape[-1],
                value_dim=value.shape[-1],
                rotary=self._pending,
                latents=latents,
                indexer=self._indexer,
                picker=self._picked_by(module),
                source=same[0] if same else None,
                block=self.blocks - 1,
                window=options.get("sliding_window"),
            )
        )
        self._pending = self._indexer = None
        return query.new_zeros(1, query.shape[2], query.shape[1], width)

    def convolve(self, call: ConvolutionCall) -> Tensor:
        """Return the number of each channel, which shows what becomes of it in a rule."""
        self.with_state.add(self.blocks - 1)
        self.called.add(self.computing[-1])
        if not call.rules:
            channels, width = call.weight.shape
            self.recurrences.append(Recurrence(None, (), channels, width - 1, (0, 0, 0), 0))
            return call.apply(call.hidden.new_zeros(1, channels, width - 1), call.hidden)
        self._convolution, self._convolved = call, 0
        if not call.is_split:
            return torch.zeros_like(call.hidden)
        numbers = torch.arange(call.hidden.shape[1], device=call.hidden.device, dtype=torch.float32)
        return numbers[None, :, None].expand(call.hidden.shape).contiguous()

    def recur(self, call: RuleCall) -> tuple[Tensor, Tensor | None]:
        convolution, begin = self._convolution, self._convolved
        if convolution is None:
            raise LookupError("a rule is applied to what no convolution has given")
        self.called.add(self.computing[-1])
        output, state = call.scan(call.mixed, call.gates, None)
        whole = channels = convolution.hidden.shape[1]
        if not convolution.is_split:
            channels = min(whole, call.mixed[0].shape[-1])
        self._convolved += channels
        self._convolution = None if self._convolved >= whole else convolution
        self.recurrences.append(
            Recurrence(
                call.rule,
                tuple(each[0, 0].long() for each in call.mixed if convolution.is_split),
                channels=channels,
                window=convolution.weight.shape[-1] - 1,
                state_shape=tuple(state.shape[1:]),
                gate_bytes=sum(gate[0, 0].numel() * gate.itemsize for gate in call.gates),
                goes_on=begin > 0,
            )
        )
        nothing = output.new_zeros(output.shape, dtype=convolution.hidden.dtype)
        return nothing, state if call.wants_state else None


class PassTables(nn.Module):
    """Gives cos and sin of all positions of a model's context, where it makes them inside its
    layers, with no module for them: read from one pass that ends where it first rotates."""

    def __init__(self, model: Any, window: int) -> None:
        super().__init__()
        device = model.device
        positions = torch.arange(window, device=device)[None]
        try:
            with in_fp32(model), intercepted(_Reader()), torch.inference_mode():
                model(
                    input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False
                )
        except _Read as read:
            self._cos, self._sin = read.cos[0], read.sin[0]

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [1, tokens, columns] of ``positions`` [1, tokens]."""
        return self._cos[positions], self._sin[positions]


class _Read(Exception):  # noqa: N818
    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos = cos
        self.sin = sin


class _Reader(Interceptor):
    """Ends a pass at its first rotation."""

    def rotary(self, form: RotaryForm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        _, _, cos, sin = form.rotation(args, kwargs)
        raise _Read(cos.clone(), sin.clone())


@contextmanager
def _watched(model: nn.Module, tracer: _Tracer) -> Iterator[None]:
    layers = set(decoder_layers(model))

    def enter(module: nn.Module, args: Any) -> None:
        if active_interceptor() is tracer:  # not in a pass of PassTables
            tracer.computing.append(module)
            tracer.blocks += module in layers

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if active_interceptor() is tracer:
            tracer.computing.pop()

    with ExitStack() as hooks:
        for part in rotary_modules(model):
            hooks.enter_context(part.register_forward_hook(tracer.saw_tables, with_kwargs=True))
        for part in model.modules():
            hooks.enter_context(part.register_forward_pre_hook(enter))
            hooks.enter_context(part.register_forward_hook(leave))
        yield
