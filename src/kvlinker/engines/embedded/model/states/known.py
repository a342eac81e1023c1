"""The rules that are known, and the names by which modeling modules have them."""

from __future__ import annotations

from kvlinker.engines.embedded.model.states.elements import SelectiveScan
from kvlinker.engines.embedded.model.states.lightning import LightningAttention
from kvlinker.engines.embedded.model.states.rules import Rule

CONVOLUTION = "causal_conv1d_fn"
"""The function by which modeling modules convolve what enters a rule."""

RULES = (
    *(
        Rule(
            name,
            ("query", "key", "value"),
            ("g", "beta"),
            "value",
            "output_final_state",
            "matrix",
            initial="initial_state",
            always_pairs=True,
        )
        for name in ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
    ),
    Rule(
        "mamba2_chunk_scan",
        ("hidden_states", "B", "C"),
        ("dt",),
        "hidden_states",
        "return_final_states",
        "number",
        initial="initial_states",
    ),
    SelectiveScan(
        "mamba_selective_scan",
        ("hidden_states", "dt", "B", "C"),
        (),
        "hidden_states",
        "return_last_state",
        "elements",
        takes_channels=False,
    ),
)
"""The functions of modeling modules that apply a rule after a convolution."""

LIGHTNING_DECAY = "get_slope_rate"
"""The method by which lightning attention says how its state fades."""

LIGHTNING = LightningAttention(
    "forward",
    ("hidden_states",),
    (),
    "hidden_states",
    "returns_state",
    "number",
    always_pairs=True,
    takes_channels=False,
)
