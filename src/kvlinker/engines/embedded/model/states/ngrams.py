"""Layers that take in n-grams of the text: what each token's embedding is made of are its id and
those of the tokens before it, as in a convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlinker.engines.embedded.model.states.recurrence import ConvolutionCall

BASE = 256
"""Ids are kept by their digits in this base, which numbers of any precision have exactly."""


def of_tokens_before(
    embed: Callable[[Any, Tensor, None], Tensor], module: Any, ids: Tensor
) -> ConvolutionCall:
    """Return the call for ``ids`` [1, tokens] of a module whose function is ``embed``. It takes the
    end of text for what stands before a text, of which all digits are therefore zeros."""
    size, end = int(module.unigram_vocab_size), int(module.eos_token_id)
    digits = next(count for count in range(1, 9) if BASE**count >= size)
    places = BASE ** torch.arange(digits, device=ids.device)[:, None]

    def embedded(entering: Tensor, weight: Tensor) -> Tensor:
        numbers = (entering.long() * places).sum(1) + end
        return embed(module, numbers % size, None).transpose(1, 2)

    entering = ((ids - end) % size)[:, None] // places % BASE
    width = entering.new_empty(digits, int(module.context_len) + 1)
    weight: Tensor = module.ngram_embedding.weight
    return ConvolutionCall(embedded, entering.to(weight.dtype), width, {}, ())
