"""Refuses the model families that earlier versions of kvlinker linked."""

from __future__ import annotations

from typing import Any

from kvlinker.base.errors import UnsupportedModelError

REMOVED = {
    "hrm_text": "HRM",
    "recurrent_gemma": "RecurrentGemma",
    "rwkv": "RWKV",
    "xlstm": "xLSTM",
    "zaya": "Zaya",
}
"""The family of each type of configuration that is refused."""

NGRAM_LAYERS = "ple_layer_ids"
"""The entry of Qwen4-Exp's configuration that lists the layers with embeddings of n-grams."""


def refuse_removed(config: Any) -> None:
    """Raise UnsupportedModelError if kvlinker no longer links models of this configuration."""
    text = config.get_text_config()
    family = REMOVED.get(text.model_type)
    if family is None and getattr(text, NGRAM_LAYERS, None):
        family = f"embeddings of n-grams, {NGRAM_LAYERS}"
    if family is not None:
        raise UnsupportedModelError(
            f"kvlinker no longer links models of type {text.model_type!r} ({family}). Serve it with"
            " transformers or vLLM alone, or choose another model for kvlinker."
        )
