"""Watches models that vLLM runs by transformers' modules: their functions rotate, and their
attention's ``forward`` is called, with no module's call that a hook would see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.rotary_forms import RotaryForm, RotaryFunction
from kvlinker.engines.vllm.adapter.attention_layers import AttentionLayer

BACKEND = "vllm.model_executor.models.transformers"
FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_emb"


def have_same_numbers(given: Tensor, turned: Tensor) -> bool:
    """Return whether a norm's input is the keys that were rotated, perhaps in another shape and
    precision."""
    return given.numel() == turned.numel() and torch.equal(
        given.flatten(), turned.to(given.dtype).flatten()
    )


def normalised(norm: nn.Module, key: Tensor, like: Tensor) -> Tensor:
    """Return keys that are not rotated yet, normalised as the rotated ones are, which come in the
    shape and precision of ``like``: the same but for their rotation, unless the norm has weights,
    which the self-test sees."""
    made: Tensor = norm.forward(key.to(like.dtype).reshape(like.shape))
    return made.reshape(key.shape).to(key.dtype)


class FunctionRotary:
    """Rotates as a function of transformers does, by the tables of a model's module."""

    def __init__(
        self, tables: Callable[[Tensor, Tensor], Any], apply: RotaryFunction, width: int
    ) -> None:
        """``tables`` makes cos and sin for [1, tokens] positions, in the precision of a tensor;
        ``width`` are the leading dimensions of a head that are rotated."""
        self._tables = tables
        self._apply = apply
        self._width = width

    def __call__(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``query`` as it is, [tokens, head_dim], and ``key`` [tokens, heads * head_dim]
        rotated to ``positions`` [tokens]."""
        heads = key.view(len(positions), -1, query.shape[-1])
        cos, sin = self._tables(key, positions[None])
        turned = heads[..., : self._width].transpose(0, 1)[None]
        _, turned = self._apply(turned, turned, cos, sin)
        rotated = heads.clone()
        rotated[..., : self._width] = turned[0].transpose(0, 1)
        return query, rotated.flatten(1)


@contextmanager
def watched_modules(
    model: nn.Module, layers: Sequence[AttentionLayer], *, rotated: Any, attended: Any
) -> Iterator[None]:
    """Have passes by transformers' modules call back as ``watched`` does; nothing is watched in
    models of vLLM's own."""
    sources = set()
    if any(kind.__module__.startswith(BACKEND) for kind in type(model).__mro__):
        names = {type(part).__module__ for part in model.modules()}
        sources = {sys.modules[name] for name in names if name.startswith("transformers.models.")}
    watch = _Watch(rotated, attended)
    with ExitStack() as undo:
        for part in model.modules() if sources else ():
            if "rotary" in type(part).__name__.lower():
                handle = part.register_forward_hook(watch.saw_tables, with_kwargs=True)
                undo.callback(handle.remove)
            if "norm" in type(part).__name__.lower():
                undo.callback(part.register_forward_hook(watch.saw_norm).remove)
        for source in sources:
            for name in FUNCTIONS:
                form = RotaryForm.of(getattr(source, name)) if hasattr(source, name) else None
                if form is not None and len(form.rotated) == 2:
                    _replace(undo, source, name, partial(watch.rotate, form))
        for layer in layers if sources else ():
            module = layer.module
            undo.callback(delattr, module, "forward")
            module.forward = partial(watch.attend, layer, module.forward)
        yield


def _replace(undo: ExitStack, source: ModuleType, name: str, by: Callable[..., Any]) -> None:
    undo.callback(setattr, source, name, getattr(source, name))
    setattr(source, name, by)


class _Watch:
    """Keeps the keys that a layer rotated until its attention is called: parts of heads that are
    not rotated are known there alone."""

    def __init__(self, rotated: Any, attended: Any) -> None:
        self._rotated = rotated
        self._attended = attended
        self._tables: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []
        self._pending: tuple[FunctionRotary, Tensor, Tensor] | None = None
        self._turned: Tensor | None = None

    def saw_tables(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a rotary embedding's tables, and the call that made them."""
        if isinstance(output, tuple):
            self._tables.append((output[0], module, args, kwargs))

    def rotate(self, form: RotaryForm, *args: Any, **kwargs: Any) -> Any:
        """Rotate as the model does."""
        apply, key, cos, _ = form.rotation(args, kwargs)
        for table, module, inputs, options in reversed(self._tables):
            if table is cos or (table.shape == cos.shape and torch.equal(table, cos)):
                rotary = FunctionRotary(
                    partial(_tables, module, inputs, options), apply, key.shape[-1]
                )
                given = next(v for v in (*inputs, *options.values()) if _is_positions(v))
                self._pending = rotary, given.reshape(-1), key[0].transpose(0, 1).clone()
                break
        result = form.function(*args, **kwargs)
        self._turned = result[-1]
        return result

    def saw_norm(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Normalise keys before their rotation where the model does so after it."""
        if self._pending is None or self._turned is None or not args:
            return
        if have_same_numbers(args[0], self._turned):
            rotary, positions, key = self._pending
            heads_first = normalised(module, key.transpose(0, 1), args[0])
            self._pending = rotary, positions, heads_first.transpose(0, 1)
            self._turned = None

    def attend(
        self,
        layer: AttentionLayer,
        forward: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Call back for what the layer rotated, and for its attention."""
        query, key, value = layer.called_with(args, kwargs)
        if self._pending is not None:
            rotary, positions, turned = self._pending
            self._pending = self._turned = None
            plain = layer.by_heads(key, value)[0].clone()
            plain[..., : turned.shape[-1]] = turned
            self._rotated(rotary, positions, plain.flatten(1))
        self._attended(layer.name, query, key, value)
        return forward(*args, **kwargs)


def _tables(
    module: nn.Module,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    like: Tensor,
    positions: Tensor,
) -> Any:
    """Return what a rotary embedding's module makes of ``positions`` in place of those that it was
    called with."""

    def replaced(value: Any) -> Any:
        if _is_positions(value):
            return positions
        return like.view(1, len(like), -1) if isinstance(value, Tensor) else value

    changed = {name: replaced(value) for name, value in options.items()}
    return module(*map(replaced, inputs), **changed)


def _is_positions(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()
