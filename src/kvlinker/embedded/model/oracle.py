"""The model's own answer behind chunks that were computed alone: what linking has to give. Shares no code with the
engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.embedded.model.interception import attention_of
from kvlinker.embedded.model.obstacles import rotary_modules
from kvlinker.linking.plan import Range

MaskOf = Callable[[nn.Module, Tensor], Tensor | None]
"""Takes a module and the attention mask [1, 1, queries, keys] that it was called with; returns another or None."""


class Oracle:
    """Computes with transformers' plainest attention, and hands each layer the masks that it would make itself."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device: torch.device = next(model.parameters()).device
        self._seen: dict[nn.Module, Tensor] = {}

    def logits(self, tokens: NDArray[np.int64], last: int) -> Tensor:
        """Return the logits of the ``last`` tokens [last, vocabulary] of the model's own pass over a text, and keep in
        mind what each layer's tokens see there."""

        def note(module: nn.Module, mask: Tensor) -> None:
            self._seen[module] = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0

        with self._masks(note):
            return self._computed(tokens, np.arange(len(tokens)), last)

    def linked_logits(self, tokens: NDArray[np.int64], chunks: Sequence[Range], last: int, *, moved: int = 0) -> Tensor:
        """Return the logits of the ``last`` tokens [last, vocabulary] of the text that ``logits`` has seen, where each
        of ``chunks`` was computed alone, and the text stands ``moved`` positions further on.

        It is one forward pass: copies of the chunks' tokens, at their places, see only their own chunk; the other
        tokens see these copies and each other. Rotary tables stay those of the beginning, since angles of far positions
        are rough in fp32: whether tables depend on distances alone is another check's matter.
        """
        length = len(tokens)
        chunk = np.full(length, -1)
        for number, (begin, end) in enumerate(chunks):
            chunk[begin:end] = number
        rows = np.concatenate([np.flatnonzero(chunk >= 0), np.flatnonzero(chunk < 0)])
        group = torch.from_numpy(chunk[rows]).to(self._device)
        visible = (group[:, None] == group) | (group[:, None] == -1)
        taken = torch.from_numpy(rows).to(self._device)

        def packed(module: nn.Module, mask: Tensor) -> Tensor | None:
            seen = visible & self._seen[module][taken][:, taken]
            if mask.dtype == torch.bool:
                return seen[None, None]
            return torch.zeros_like(mask).masked_fill_(~seen, torch.finfo(mask.dtype).min)

        with self._masks(packed), _tables_moved_back(self._model, moved):
            return self._computed(tokens[rows], rows + moved, last)

    @torch.inference_mode()
    def _computed(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], last: int) -> Tensor:
        with attention_of(self._model, "eager"):
            output = self._model(
                input_ids=torch.from_numpy(tokens)[None].to(self._device),
                position_ids=torch.from_numpy(positions)[None].to(self._device),
                use_cache=False,
                logits_to_keep=last,
            )
        logits: Tensor = output.logits[0, -last:].float()
        return logits

    @contextmanager
    def _masks(self, mask_of: MaskOf) -> Iterator[None]:
        """Ask ``mask_of`` for the mask of each module that is given one."""

        def replaced(module: nn.Module, value: Any) -> Any:
            if not isinstance(value, Tensor) or value.ndim != 4 or value.shape[-1] != value.shape[-2]:
                return value
            mask = mask_of(module, value)
            return value if mask is None else mask

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return tuple(replaced(module, value) for value in args), {
                name: replaced(module, value) for name, value in kwargs.items()
            }

        with _hooked([part for part in self._model.modules() if hasattr(part, "layer_idx")], hook):
            yield


@contextmanager
def _tables_moved_back(model: nn.Module, moved: int) -> Iterator[None]:
    """Have rotary modules make the tables of positions that are ``moved`` smaller."""

    def back(value: Any) -> Any:
        return value - moved if isinstance(value, Tensor) and not value.is_floating_point() else value

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(back, args)), {name: back(value) for name, value in kwargs.items()}

    with _hooked(rotary_modules(model), hook):
        yield


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    handles = [part.register_forward_pre_hook(hook, with_kwargs=True) for part in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
