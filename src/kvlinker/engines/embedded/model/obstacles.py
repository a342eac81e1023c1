"""Finds why a model cannot be linked, by observing its computations: no family code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, nn

from kvlinker.base.errors import UnsupportedModelError
from kvlinker.engines.embedded.model.interception import attention_of

LOOKED_AT = 11
"""Tokens of the passes that look at a model: a number that is hardly a model's size, so that values
kept for every token differ from a state by their shape."""

ROUNDING = 1e-3
"""The relative difference up to which logits count as the same. Tokens that do not see the
difference have the very same up to rounding."""

FURTHER = 100
"""The positions by which a text is moved, to see if that changes its logits."""

EXHAUSTED = (MemoryError, torch.OutOfMemoryError)
"""The errors that say nothing about the kind of a model."""


class Obstacle(StrEnum):
    """The kinds of models that are refused, each as the end of a sentence about the model."""

    INPUT = "its own forward pass does not run on token ids alone"
    BIDIRECTIONAL = "its tokens see the tokens after them, as in an encoder"
    STATE = (
        "its layers keep a state instead of, or in addition to, keys and values (state-space model,"
        " linear attention, recurrence or convolution)"
    )
    COMPRESSION = (
        "its compressors pool tokens, so many at a time from the start of the text, into keys and"
        " values, and chunks begin and end between"
    )
    SELECTION = (
        "its indexer picks the tokens that its queries see in a form of its own (sparse attention)"
    )
    LEARNED = (
        "its positions are learned embeddings that are added to the tokens', so that KV cannot be"
        " moved"
    )
    ALIBI = "its attention has position biases (ALiBi), not rotary embeddings"
    ROTARY_FORM = "its rotary embedding is applied in a form of its own"
    NO_ROTARY = "its positions are not rotary embeddings"
    ATTENTION_FORM = (
        "its attention is computed in a form of its own, not through transformers' attention"
        " interface once in every layer"
    )
    WINDOW = (
        "its configuration does not say max_position_embeddings, the length of its context window"
    )
    PLACE = "it computes different results for the same text at later positions"
    INEXACT = "linked KV and its own forward pass do not agree"


def refusal(model: Any, obstacle: Obstacle, detail: str = "") -> UnsupportedModelError:
    """Return the error that says of what kind the model is, with ``detail`` in sentences, and what
    to do."""
    return UnsupportedModelError(
        f"{type(model).__name__} is not supported yet: {obstacle}."
        f" {detail}{' ' if detail else ''}Serve it without kvlinker, or report it with its"
        " config.json and the output of `kvlinker check`."
    )


def obstacle_of(model: Any, otherwise: Obstacle) -> Obstacle:
    """Return the reason why the model cannot be linked, as far as its own computation shows one,
    else ``otherwise``.

    Computes two short forward passes of the model's own.
    """
    try:
        first, again, holds = _looks(model)
    except EXHAUSTED:
        raise
    except Exception:  # whatever the model's code raises
        return Obstacle.INPUT
    if (first - again).norm() > ROUNDING * first.norm():
        return Obstacle.BIDIRECTIONAL
    if parts_named("compressor", model):  # short texts show its states
        return Obstacle.COMPRESSION
    if has_indexer(model):
        return Obstacle.SELECTION
    if holds:
        return Obstacle.STATE
    config = model.config.get_text_config()
    if _has_rotary(model) and not getattr(config, "alibi", False):
        return otherwise
    if any("alibi" in name.lower() for name in dir(inspect.getmodule(type(model)))):
        return Obstacle.ALIBI
    parts = {name: type(part).__name__.lower() for name, part in model.named_modules()}
    if any(
        ("position" in name or "wpe" in name) and "embedding" in kind
        for name, kind in parts.items()
    ):
        return Obstacle.LEARNED
    return Obstacle.NO_ROTARY


def depends_on_place(model: Any) -> bool:
    """Return whether the model computes different results for the same text at later positions, as
    far as it takes positions. Runs two short forward passes of the model's own, which must be in
    fp32."""
    device = model.device
    ids = torch.arange(LOOKED_AT, device=device)[None]
    vocabulary = model.config.get_text_config().vocab_size
    try:
        with attention_of(model, "eager"), torch.inference_mode():
            here, there = (
                model(input_ids=ids % vocabulary, position_ids=ids + moved, use_cache=False).logits
                for moved in (0, FURTHER)
            )
    except Exception:  # whatever the model's code raises of positions that it does not know
        return False
    return bool((here - there).norm() > ROUNDING * here.norm())


def states_held(output: Any) -> int:
    """Count the tensors that a forward pass over LOOKED_AT tokens hands on, to the pass that
    follows, and that are not kept for every token."""
    kept = [value for value in output.values() if not isinstance(value, Tensor)]
    return sum(LOOKED_AT not in tensor.shape for tensor in _tensors(kept) if tensor.ndim)


def has_indexer(model: nn.Module) -> bool:
    """Return whether layers pick the tokens that they see by an indexer. Short texts do not show
    it: it picks all of their tokens."""
    return bool(parts_named("indexer", model))


def rotary_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make tables of cos and sin."""
    return parts_named("rotary", model)


def parts_named(word: str, model: nn.Module) -> list[nn.Module]:
    """Return the modules whose classes have a word in their names."""
    return [part for part in model.modules() if word in type(part).__name__.lower()]


def _looks(model: Any) -> tuple[Tensor, Tensor, bool]:
    """Return the logits of all tokens but the last with two different last tokens, [tokens,
    vocabulary] each, and whether the model holds a state after the second pass."""
    device = model.device
    ids = torch.arange(LOOKED_AT, device=device)[None] % model.config.get_text_config().vocab_size
    before = set(_plain_tensors(model))
    with attention_of(model, "eager"), torch.inference_mode():
        first = model(input_ids=ids, use_cache=False).logits[0, :-1]
        ids[0, -1] = 0
        output = model(input_ids=ids, use_cache=True)
    return (
        first,
        output.logits[0, :-1],
        bool(states_held(output)) or set(_plain_tensors(model)) != before,
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that a model's cache holds, but keys and values that windows cut."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            if name not in ("keys", "values"):
                yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
        yield from _tensors(vars(value))


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the tensors that modules hold as neither parameters nor buffers, by module and name."""
    for name, part in model.named_modules():
        yield from (
            (name, field) for field, value in vars(part).items() if isinstance(value, Tensor)
        )


def _has_rotary(model: Any) -> bool:
    config = model.config.get_text_config()
    return bool(
        rotary_modules(model)
        or getattr(config, "rope_parameters", None)
        or getattr(config, "rotary_dim", None)
    )
