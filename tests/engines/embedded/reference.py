"""Linking done slowly: transformers' own forward pass over the whole prompt, attention matrices and
all, in which the keys and values of tokens that a layer does not compute give way to placed ones.
Shares no code with the engine."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from transformers.cache_utils import DynamicCache

from tests.toy_models import tiny_model


@cache
def reference_model(family, **changes):
    """The same weights as ``loaded_model``'s, in a model of its own that attends as transformers
    does."""
    return tiny_model(family, **changes)


class Pass(NamedTuple):
    """``logits`` [last, vocabulary]; per layer the new ``keys`` and ``values`` [kv_heads, tokens,
    dim] and the ``attention`` [heads, tokens, tokens]."""

    logits: torch.Tensor
    keys: list
    values: list
    attention: list


class Replacing(DynamicCache):  # type: ignore[misc]  # transformers is untyped
    """Notes each layer's new keys and values, and hands on the placed ones where ``computed`` is
    false."""

    def __init__(self, computed, placed):
        super().__init__()
        self.computed, self.placed = computed, placed
        self.keys, self.values = [], []

    def update(self, key, value, layer, *args, **kwargs):
        self.keys.append(key[0])
        self.values.append(value[0])
        if self.placed is None:
            return key, value
        mask = torch.from_numpy(self.computed[layer])[None, None, :, None]
        old_key, old_value = self.placed[layer]
        return torch.where(mask, key, old_key[None]), torch.where(mask, value, old_value[None])


@torch.inference_mode()
def forward(model, tokens, computed=None, placed=None, first=0, last=0):
    """One pass over all ``tokens``, at positions from ``first`` on. ``computed``: masks [tokens],
    one per layer; elsewhere the keys and values of ``placed`` take their place (but all tokens get
    new ones, which are returned). The logits are those of the ``last`` tokens; of all by default,
    which a large vocabulary makes large."""
    replacing = Replacing(computed, placed)
    output = model(
        input_ids=torch.tensor([list(tokens)]),
        position_ids=torch.arange(first, first + len(tokens))[None],
        past_key_values=replacing,
        output_attentions=True,
        logits_to_keep=last,
    )
    return Pass(
        output.logits[0],
        replacing.keys,
        replacing.values,
        [weights[0] for weights in output.attentions],
    )


class Reference:
    """One prompt whose chunks were computed alone, or behind their prefixes, and are placed where
    they stand; if not ``positioned``, they stay where they were. ``model`` takes the place of a
    family's."""

    def __init__(self, prompt, family="llama", positioned=True, model=None, **changes):
        self.model = model or reference_model(family, **changes)
        self.prompt = prompt
        self.layers = self.model.config.num_hidden_layers
        self.parts = "vk" if "latents" in family else "kv"  # a latent is the cache's key
        self.inexact = np.zeros(len(prompt), dtype=bool)
        self.cached = np.zeros(len(prompt), dtype=bool)
        tokens = prompt.tokens.tolist()
        self.placed: list[tuple[torch.Tensor, ...]] | None = None
        for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
            before = len(chunk.prefix)
            self.cached[span.start : span.end] = True
            self.inexact[span.start : span.end] = tokens[: span.start] != list(chunk.prefix)
            # Rotary embeddings tell distances only, so that a chunk may be computed where it is to
            # be placed.
            first = span.start - before if positioned else 0
            alone = forward(self.model, [*chunk.prefix, *chunk.tokens], first=first, last=1)
            self._place(
                span,
                [
                    (key[:, before:], value[:, before:])
                    for key, value in zip(*alone[1:3], strict=True)
                ],
            )

    @property
    def asked(self):
        """The layers in which policies are asked: those that have keys and values of their own, the
        first ones."""
        return self.layers if self.placed is None else len(self.placed)

    def _place(self, span, kv):
        if self.placed is None:
            length = len(self.prompt)
            self.placed = [
                tuple(part.new_zeros(part.shape[0], length, part.shape[2]) for part in own)
                for own in kv
            ]
        for whole, own in zip(self.placed, kv, strict=True):
            whole[0][:, span.start : span.end], whole[1][:, span.start : span.end] = own

    def run(self, selected):
        """A pass in which fresh tokens, the last one and those ``selected`` in each layer (the last
        entry counts for all that follow) are computed."""
        masks = [~self.cached | mask for mask in selected]
        for mask in masks:
            mask[-1] = True
        masks += [masks[-1]] * (self.layers - len(masks))
        return forward(self.model, self.prompt.tokens.tolist(), masks, self.placed)

    def deviation(self, selected, layer, parts="kv"):
        """Of each token's new key and value from the placed ones in ``layer``, where ``selected``
        has the layers before it: squared L2 over all heads, [tokens]."""
        assert self.placed is not None, "there is no chunk"
        now = self.run(selected)
        found = np.zeros(len(self.prompt))
        for part, new, old in zip(
            self.parts, (now.keys[layer], now.values[layer]), self.placed[layer], strict=True
        ):
            if part in parts:
                found += ((new - old) ** 2).sum(dim=(0, 2)).double().numpy()
        return found

    def answer(self, selected, steps):
        """Greedy tokens and their log probabilities."""
        masks = [~self.cached | mask for mask in selected]
        for mask in masks:
            mask[-1] = True
        tokens, chosen, logprobs = self.prompt.tokens.tolist(), [], []
        for step in range(steps):
            computed = [np.concatenate([mask, np.ones(step, dtype=bool)]) for mask in masks]
            placed = [
                tuple(torch.nn.functional.pad(part, (0, 0, 0, step)) for part in layer)
                for layer in self.placed or []
            ]
            found = torch.log_softmax(
                forward(self.model, tokens, computed, placed or None).logits[-1], -1
            )
            chosen.append(int(found.argmax()))
            logprobs.append(float(found.max()))
            tokens.append(chosen[-1])
        return chosen, logprobs

    def distributions(self, selected, continuation):
        """Log probabilities [steps, vocabulary] of each next token while the prompt goes on with
        these tokens."""
        steps = len(continuation)
        masks = [
            np.concatenate([~self.cached | mask, np.ones(steps, dtype=bool)]) for mask in selected
        ]
        for mask in masks:
            mask[len(self.prompt) - 1] = True
        placed = [
            tuple(torch.nn.functional.pad(part, (0, 0, 0, steps)) for part in layer)
            for layer in self.placed or []
        ]
        tokens = [*self.prompt.tokens.tolist(), *continuation]
        logits = forward(self.model, tokens, masks, placed or None, last=steps + 1).logits
        return torch.log_softmax(logits[:-1].double(), -1)


def chunk_attention(model, tokens):
    """Attention weights of a sequence, mean over layers and heads: [tokens, tokens]."""
    return (
        torch.stack([weights.mean(0) for weights in forward(model, tokens).attention])
        .mean(0)
        .double()
        .numpy()
    )
