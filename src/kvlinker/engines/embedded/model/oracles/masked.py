"""The model's own answer after chunks that were computed alone, which linking must equal.

It shares no code with the engine: transformers computes all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from kvlinker.engines.embedded.model.indexers import is_indexer
from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.engines.embedded.model.obstacles import rotary_modules
from kvlinker.prompting.segments import Range

MaskOf = Callable[[nn.Module, Tensor], Tensor]
"""Takes a module and the attention mask [1, 1, queries, keys] that it was called with, and returns
the mask that it gets."""


class Oracle:
    """Computes one text by transformers' plainest attention, under masks that each layer's own are
    made into.

    ``logits`` [last, vocabulary] are those of the text's last tokens in the model's own forward
    pass.
    """

    def __init__(self, model: Any, tokens: NDArray[np.int64], last: int) -> None:
        self._model = model
        self._device: torch.device = next(model.parameters()).device
        self._tokens = tokens
        self._last = last
        self._seen: dict[nn.Module, Tensor] = {}
        with self._masks(self._note):
            self.logits = self._computed(np.arange(len(tokens)))

    def linked_logits(self, chunks: Sequence[Range], *, moved: int = 0) -> Tensor:
        """Return the logits [last, vocabulary] of the text's last tokens, where each of ``chunks``
        was computed alone, and the text stands ``moved`` positions further on.

        It is one forward pass: copies of the chunks' tokens, at their places, see only their own
        chunk; the other tokens see these copies and each other. Rotary tables stay those of the
        beginning, since angles of far positions are rough in fp32: whether tables depend on
        distances alone is another check's matter.
        """
        chunk = np.full(len(self._tokens), -1)
        for number, (begin, end) in enumerate(chunks):
            chunk[begin:end] = number
        rows = np.concatenate([np.flatnonzero(chunk >= 0), np.flatnonzero(chunk < 0)])
        group = torch.from_numpy(chunk[rows]).to(self._device)
        visible = (group[:, None] == group) | (group[:, None] == -1)
        taken = torch.from_numpy(rows).to(self._device)

        def packed(module: nn.Module, mask: Tensor) -> Tensor:
            seen = visible & self._seen[module][taken][:, taken]
            if mask.dtype == torch.bool:
                return seen[None, None]
            return torch.zeros_like(mask).masked_fill_(~seen, torch.finfo(mask.dtype).min)

        with self._masks(packed), tables_moved_back(self._model, moved):
            return self._computed(rows, moved)

    def _note(self, module: nn.Module, mask: Tensor) -> Tensor:
        """Keep which tokens see which in a layer: [tokens, tokens]."""
        self._seen[module] = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
        return mask

    @torch.inference_mode()
    def _computed(self, rows: NDArray[np.int64], moved: int = 0) -> Tensor:
        """Return the logits [last, vocabulary] of the last of the tokens ``rows``."""
        with attention_of(self._model, "eager"):
            output = self._model(
                input_ids=torch.from_numpy(self._tokens[rows])[None].to(self._device),
                position_ids=torch.from_numpy(rows + moved)[None].to(self._device),
                use_cache=False,
                logits_to_keep=self._last,
            )
        logits: Tensor = output.logits[0, -self._last :].float()
        return logits

    @contextmanager
    def _masks(self, mask_of: MaskOf) -> Iterator[None]:
        """Give each layer the mask that ``mask_of`` returns."""

        def replaced(module: nn.Module, value: Any) -> Any:
            is_mask = isinstance(value, Tensor) and value.ndim == 4
            return (
                mask_of(module, value) if is_mask and value.shape[-1] == value.shape[-2] else value
            )

        layers = [part for part in self._model.modules() if hasattr(part, "layer_idx")]
        with _inputs_changed(layers, replaced):
            yield


@contextmanager
def tables_moved_back(model: nn.Module, moved: int) -> Iterator[None]:
    """Make rotary modules compute the tables of positions that are ``moved`` smaller, and indexers
    pick for these."""

    def back(module: nn.Module, value: Any) -> Any:
        is_positions = isinstance(value, Tensor) and value.dtype == torch.long
        return value - moved if is_positions else value

    indexers = [part for part in model.modules() if is_indexer(type(part))]
    with _inputs_changed([*rotary_modules(model), *indexers], back):
        yield


@contextmanager
def _inputs_changed(
    modules: Sequence[nn.Module], change: Callable[[nn.Module, Any], Any]
) -> Iterator[None]:
    """Call the modules with what ``change`` makes of each argument."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        changed = {name: change(module, value) for name, value in kwargs.items()}
        return tuple(change(module, value) for value in args), changed

    with ExitStack() as hooks:
        for part in modules:
            hooks.enter_context(part.register_forward_pre_hook(hook, with_kwargs=True))
        yield
