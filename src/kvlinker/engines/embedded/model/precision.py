"""Computes a model in fp32 without a copy of it in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from kvlinker.engines.embedded.model.states.known import LIGHTNING_DECAY
from kvlinker.engines.embedded.model.weights.coded import CodedWeight

CHUNK_BYTES = 4 << 20
"""The most bytes of a linear layer's weight that are in memory in fp32 at a time."""

SMALL = 1 << 16
"""The most numbers of a weight that is small: the weight of a norm, a scale."""

KEPT_BYTES = 32 << 20
"""The most bytes of weights that stay in fp32 from pass to pass: all of a small model's."""

_COMPUTING: WeakSet[nn.Module] = WeakSet()
"""The models that compute in fp32 now."""


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Compute every module of ``model`` in fp32 for a while, from its weights as they are.

    Modules have their weights in fp32 all the time while KEPT_BYTES last, and beyond that small
    ones and convolutions, since others may read them, too. Of the others, linear layers
    multiply a part of their rows after the other, or give their weight in fp32 to code that reads
    it, embeddings give fp32 out, and large modules have their weights in fp32 for as long as they
    run. Memory rises by what stays, and by the largest part. A model in fp32 is left as it is, and
    so is one that computes in fp32 already.
    """
    with ExitStack() as undo:
        if model in _COMPUTING:
            yield
            return
        _COMPUTING.add(model)
        undo.callback(_COMPUTING.remove, model)
        room = KEPT_BYTES
        for module in model.modules():
            if _in_fp32_already(module):
                continue
            taken = 0 if isinstance(module, nn.Embedding) else _bytes_in_fp32(module)
            stays = 0 < taken <= room or isinstance(module, nn.Conv1d) or _is_small(module)
            stays = stays or hasattr(module, LIGHTNING_DECAY)
            if stays and not isinstance(module, nn.Embedding):
                room = max(room - taken, 0)
                staying: list[dict[str, Tensor | None]] = []
                _widen_weights(staying, module, None)
                undo.callback(_restore, staying, module, None, None)
                if hasattr(module, LIGHTNING_DECAY):
                    _rebuild_decay(module)
            elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
                undo.callback(delattr, module, "forward")
                weight = module.weight.detach()
                compute = partial(_linear_in_fp32, weight, module.bias)
                module.forward = compute  # type: ignore[method-assign]
                if isinstance(weight, CodedWeight):
                    continue  # none of the families that GGUF files have reads it by itself
                undo.callback(module._parameters.update, dict(module._parameters))
                wide: Any = weight.as_subclass(_Wide)
                module._parameters["weight"] = wide
            elif isinstance(module, nn.Embedding):
                undo.callback(module.register_forward_hook(_widen_output).remove)
            else:
                kept: list[dict[str, Tensor | None]] = []
                undo.callback(
                    module.register_forward_pre_hook(partial(_widen_weights, kept)).remove
                )
                undo.callback(
                    module.register_forward_hook(partial(_restore, kept), always_call=True).remove
                )
        yield


def _in_fp32_already(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return all(tensor.dtype == torch.float32 or not tensor.is_floating_point() for tensor in own)


def _rebuild_decay(module: Any) -> None:
    """Make lightning attention fade in fp32: in rounded tables, a block of tokens fades otherwise
    than the same tokens one by one."""
    rate = module.get_slope_rate(module.slope_rate.device)
    names = ("query_decay", "key_decay", "diagonal_decay")
    tables = dict(zip(names, module.decay_factors(rate), strict=True))
    module._buffers.update(tables | {"slope_rate": rate})


def _bytes_in_fp32(module: nn.Module) -> int:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return sum(each.numel() for each in own) * torch.float32.itemsize


def _is_small(module: nn.Module) -> bool:
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return all(tensor.numel() <= SMALL for tensor in own)


class _Wide(Tensor):
    """A weight that is converted to fp32 each time that code computes with it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.dtype.__get__:  # type: ignore[attr-defined]
            return torch.float32
        with torch._C.DisableTorchFunctionSubclass():
            if func not in OF_ANY_DTYPE:
                args, kwargs = (_wide(args), _wide(kwargs or {}))
            return func(*args, **(kwargs or {}))


OF_ANY_DTYPE = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
}


def _wide(given: Any) -> Any:
    """Return arguments of a function with what is ``_Wide`` in fp32."""
    if isinstance(given, _Wide):
        return given.as_subclass(Tensor).float()
    if isinstance(given, tuple | list):
        return type(given)(map(_wide, given))
    if isinstance(given, dict):
        return {name: _wide(value) for name, value in given.items()}
    return given


def _linear_in_fp32(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> Tensor:
    """Return ``inputs`` [..., in_features] multiplied in fp32: [..., out_features]."""
    features, width = weight.shape
    output = inputs.new_empty(*inputs.shape[:-1], features, dtype=torch.float32)
    rows = max(1, CHUNK_BYTES // (width * torch.float32.itemsize))
    for begin in range(0, features, rows):
        part = slice(begin, begin + rows)
        chosen = weight.rows(part) if isinstance(weight, CodedWeight) else weight[part]
        output[..., part] = nn.functional.linear(inputs.float(), chosen.float())
    return output if bias is None else output + bias.float()


def _widen_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.float()


def _widen_weights(kept: list[dict[str, Tensor | None]], module: nn.Module, args: Any) -> None:
    """Give the module its own weights and buffers in fp32, and keep those that it had."""
    kept.extend((dict(module._parameters), dict(module._buffers)))
    for name, weight in module._parameters.items():
        if weight is not None and weight.is_floating_point():
            module._parameters[name] = nn.Parameter(weight.detach().float(), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            module._buffers[name] = buffer.float()


def _restore(
    kept: list[dict[str, Tensor | None]], module: nn.Module, args: Any, output: Any
) -> None:
    module._parameters.update(kept[0])  # type: ignore[arg-type]
    module._buffers.update(kept[1])
    kept.clear()
