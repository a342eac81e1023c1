"""The families that stand for all others in the core; needs no torch."""

KINDS = (
    "llama",
    "gpt_oss-sinks",
    "deepseek_v3-latents-interleaved",
    "deepseek_v32-picks",
    "qwen3_5-states",
    "mamba2-alone",
)
"""One family of each kind of attention: full, windows with sinks, latents, picked tokens, layers
with a state beside attention, and no attention at all. ``make test-all`` runs the others."""
