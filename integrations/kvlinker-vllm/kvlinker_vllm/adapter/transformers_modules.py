"""Watches functions that rotate in models that vLLM runs by transformers' modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.engines.contract.rotary_forms import RotaryForm, RotaryFunction

BACKEND = "vllm.model_executor.models.transformers"
FAMILIES = "transformers.models."
FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_emb"


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
def watch_rotary_functions(
    model: nn.Module, rotated: Callable[[FunctionRotary, Tensor, Tensor, Tensor], None]
) -> Iterator[None]:
    """Call back from functions of transformers' that rotate queries and keys.
    ``rotated(rotary, positions, key, turned)`` gets keys [heads, tokens, width] before and after,
    and an object that rotates as the function did. Nothing is watched in models of vLLM's own."""
    if not any(kind.__module__.startswith(BACKEND) for kind in type(model).__mro__):
        yield
        return
    tables: list[tuple[Tensor, nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def saw_tables(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        """Note a rotary embedding's tables, and the call that made them."""
        if isinstance(output, tuple):
            tables.append((output[0], module, args, kwargs))

    def rotate(form: RotaryForm, *args: Any, **kwargs: Any) -> Any:
        """Rotate as the model does."""
        apply, key, cos, _ = form.rotation(args, kwargs)
        key = key[0].clone()
        result = form.function(*args, **kwargs)
        for table, module, inputs, options in reversed(tables):
            if table is cos or (table.shape == cos.shape and torch.equal(table, cos)):
                made = partial(_tables, module, inputs, options)
                given = next(v for v in (*inputs, *options.values()) if _is_positions(v))
                rotary = FunctionRotary(made, apply, key.shape[-1])
                rotated(rotary, given.reshape(-1), key, result[-1])
                break
        return result

    names = {type(part).__module__ for part in model.modules()}
    with ExitStack() as undo:
        for part in model.modules():
            if "rotary" in type(part).__name__.lower():
                handle = part.register_forward_hook(saw_tables, with_kwargs=True)
                undo.callback(handle.remove)
        for source in (sys.modules[name] for name in names if name.startswith(FAMILIES)):
            for name in FUNCTIONS:
                function = getattr(source, name, None)
                form = None if function is None else RotaryForm.of(function)
                if form is not None and len(form.rotated) == 2:
                    undo.callback(setattr, source, name, function)
                    setattr(source, name, partial(rotate, form))
        yield


def _tables(
    module: nn.Module,
    inputs: tuple[Any, ...],
    options: dict[str, Any],
    like: Tensor,
    positions: Tensor,
) -> Any:
    """Return what a rotary embedding's module makes of ``positions`` in place of those that it was
    called with."""

    def replace_value(value: Any) -> Any:
        if _is_positions(value):
            return positions
        return like.view(1, len(like), -1) if isinstance(value, Tensor) else value

    changed = {name: replace_value(value) for name, value in options.items()}
    return module(*map(replace_value, inputs), **changed)


def _is_positions(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()
