"""The length up to which a model computes the same everywhere in a text: computations that depend
on absolute positions beyond some length limit its context there."""

from __future__ import annotations

from typing import Any

from kvlinker.engines.embedded.model.obstacles import (
    Obstacle,
    obstacle_of,
    parts_named,
    refusal,
)

UNSAID_WINDOW = 1 << 16
"""The context window of models whose configuration says none, as nothing in them depends on how
long a text is: all of their layers keep a state, or attend in windows."""

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Rotary embeddings whose angles change once a sequence passes the length that the model was
pretrained with."""

QUERY_SCALING = "llama_4_scaling_beta"
"""The rotary parameter by which queries beyond the length that the model was pretrained with are
scaled."""

STEPWISE_SCALING = "attn_temperature_tuning"
"""Says that queries are scaled from position ``floor_scale`` - 1 on."""


def context_window(model: Any) -> int:
    """Count the positions that the model is made for, and over which it computes the same
    everywhere: neither its rotary embedding nor the scale of its queries changes, and no attention
    is cut at fixed positions.

    Raises UnsupportedModelError if its configuration does not say, and its attention is not bounded
    by a window.
    """
    config = model.config.get_text_config()
    window = said_window(model)
    if window is None:
        if parts_named("attention", model) and not getattr(config, "sliding_window", None):
            raise refusal(model, obstacle_of(model, Obstacle.WINDOW))
        window = UNSAID_WINDOW
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE or parameters.get(QUERY_SCALING):
            window = min(window, int(parameters.get("original_max_position_embeddings") or window))
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        window = min(window, int(config.attention_chunk_size))
    if getattr(config, STEPWISE_SCALING, False):
        window = min(window, int(config.floor_scale) - 1)
    return window


def said_window(model: Any) -> int | None:
    """Return the context window that the model's configuration says; None if it says none."""
    window = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return None if window is None else int(window)


def scale_queries_alike(model: Any) -> None:
    """Remove from attention a scale of queries that is 1 all over ``context_window``: it goes by a
    token's place in the pass, where tokens of many requests stand."""
    for part in model.modules():
        if getattr(part, STEPWISE_SCALING, False):
            setattr(part, STEPWISE_SCALING, False)
