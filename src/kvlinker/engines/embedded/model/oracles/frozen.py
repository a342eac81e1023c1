"""The model's own answer after chunks that were computed alone, for models whose layers keep a
state, or pick the tokens that they see, which no mask describes.

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

from kvlinker.engines.embedded.model.decoder import decoder_layers
from kvlinker.engines.embedded.model.interception import attention_of
from kvlinker.engines.embedded.model.oracles.masked import tables_moved_back
from kvlinker.engines.embedded.model.oracles.referee import Referee
from kvlinker.prompting.segments import Range


class FrozenOracle:
    """Computes one text with the hidden states of chunks' tokens as they were when each chunk was
    computed alone; keys, values and states are the model's own of these hidden states.

    ``logits`` [last, vocabulary] are those of the text's last tokens in the model's own forward
    pass.
    """

    def __init__(
        self, model: Any, tokens: NDArray[np.int64], last: int, referee: Referee | None = None
    ) -> None:
        """``referee`` is called with the indexers' picks in each chunk, and in the text, for which
        it gets None."""
        self._model = model
        self._referee = referee or Referee()
        self._tokens = torch.from_numpy(tokens).to(next(model.parameters()).device)
        self._last = last
        self._layers = [*decoder_layers(model), *_seeing_neighbours(model)]
        self.logits = self._computed(self._tokens)

    def linked_logits(
        self, chunks: Sequence[Range], *, again: Sequence[int] = (), moved: int = 0
    ) -> Tensor:
        """Return the logits [last, vocabulary] of the text's last tokens, where each of ``chunks``
        was computed alone and the text stands ``moved`` positions further on. The positions
        ``again`` are computed in the text.

        Rotary tables stay those of the beginning, since angles of far positions are rough in fp32.
        """
        inputs = [self._inputs(begin, end) for begin, end in chunks]

        def frozen(layer: nn.Module, hidden: Tensor) -> Tensor:
            changed = hidden.clone()
            for (begin, end), alone in zip(chunks, inputs, strict=True):
                changed[:, begin:end] = alone[layer]
            changed[:, list(again)] = hidden[:, list(again)]
            return changed

        with self._entering(frozen), tables_moved_back(self._model, moved):
            return self._computed(self._tokens, moved)

    def _inputs(self, begin: int, end: int) -> dict[nn.Module, Tensor]:
        """Return what enters each layer, [1, tokens, …], where these tokens are computed alone."""
        found: dict[nn.Module, Tensor] = {}

        def note(layer: nn.Module, hidden: Tensor) -> Tensor:
            found[layer] = hidden.clone()
            return hidden

        with self._entering(note):
            self._computed(self._tokens[begin:end], text=(begin, end))
        return found

    @torch.inference_mode()
    def _computed(
        self, tokens: Tensor, moved: int = 0, text: tuple[int, int] | None = None
    ) -> Tensor:
        """Return the logits [last, vocabulary] of the last of these tokens."""
        positions = torch.arange(moved, moved + len(tokens), device=tokens.device)
        with attention_of(self._model, "eager"), self._referee.recording(self._model, text):
            output = self._model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False
            )
        logits: Tensor = output.logits[0, -self._last :].float()
        return logits

    @contextmanager
    def _entering(self, change: Callable[[nn.Module, Tensor], Tensor]) -> Iterator[None]:
        """Change the input of each layer by ``change``."""

        def entering(
            layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            if args:
                return (change(layer, args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(layer, kwargs["hidden_states"])}

        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.enter_context(layer.register_forward_pre_hook(entering, with_kwargs=True))
            yield


def _seeing_neighbours(model: nn.Module) -> list[nn.Module]:
    """Return the modules that convolve tokens: attention, or another convolution, may come before
    in the same decoder layer."""
    return [
        part
        for part in model.modules()
        if any(isinstance(child, nn.Conv1d) for child in part.children())
    ]
