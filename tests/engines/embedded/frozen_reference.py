"""Linking done slowly where layers keep a state: transformers' own forward pass over the whole
prompt, in which the hidden states of tokens that a layer does not compute are those that the chunk
had when it was computed alone. Shares no code with the engine."""

from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

from tests.engines.embedded.reference import reference_model


def decoder(model):
    """The decoder layers of a model, or of the part of it that reads text: the first modules that
    are listed there."""
    text = getattr(getattr(model, "model", None), "language_model", model)
    return next(part for part in text.modules() if isinstance(part, nn.ModuleList))


def places(model):
    """Where hidden states enter: decoder layers, and what convolves tokens in them, which attention
    or another of its kind may come before. Each with its decoder layer's index."""
    return [
        (index, part)
        for index, layer in enumerate(decoder(model))
        for part in layer.modules()
        if part is layer or any(isinstance(child, nn.Conv1d) for child in part.children())
    ]


@contextmanager
def entering(model, change):
    """Each place gets what ``change`` makes of its number and that."""

    def hook(place):
        def run(part, args, kwargs):
            if args:
                return (change(place, args[0]), *args[1:]), kwargs
            return args, kwargs | {"hidden_states": change(place, kwargs["hidden_states"])}

        return run

    handles = [
        part.register_forward_pre_hook(hook(place), with_kwargs=True)
        for place, (_, part) in enumerate(places(model))
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def computed_alone(model, chunk):
    """What enters each place of the chunk's tokens, behind its prefix: [tokens, width]."""
    found = {}

    def note(place, hidden):
        found[place] = hidden[0, len(chunk.prefix) :].clone()
        return hidden

    with entering(model, note):
        model(input_ids=torch.tensor([[*chunk.prefix, *chunk.tokens]]), use_cache=False)
    return [found[place] for place in sorted(found)]


@torch.inference_mode()
def frozen_answer(family, prompt, masks, steps):
    """Greedy tokens and their log probabilities, where ``masks`` [tokens] says for each decoder
    layer which tokens of chunks are computed; the last mask counts for all layers that follow.
    Fresh tokens, and the last one, are computed anyway."""
    model = reference_model(family)
    layers = [index for index, _ in places(model)]
    masks = [~prompt.cached | mask for mask in masks]
    for mask in masks:
        mask[-1] = True
    masks += [masks[-1]] * (len(decoder(model)) - len(masks))
    kept = [np.flatnonzero(~masks[index]) for index in layers]
    frozen = [torch.empty(0)] * len(layers)
    for chunk, span in zip(prompt.chunks, prompt.spans, strict=True):
        for place, part in enumerate(computed_alone(model, chunk)):
            if not len(frozen[place]):
                frozen[place] = torch.zeros(len(prompt), *part.shape[1:])
            frozen[place][span.start : span.end] = part

    def freeze(place, hidden):
        changed = hidden.clone()
        changed[0, kept[place]] = frozen[place][kept[place]]
        return changed

    ids, tokens, logprobs = prompt.tokens.tolist(), [], []
    for _ in range(steps):
        with entering(model, freeze):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        found = torch.log_softmax(logits.float(), -1)
        tokens.append(int(found.argmax()))
        logprobs.append(float(found.max()))
        ids.append(tokens[-1])
    return tokens, logprobs
