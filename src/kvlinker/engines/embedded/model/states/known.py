"""The rules that are known, and the names by which modeling modules have them."""

from __future__ import annotations

from kvlinker.engines.embedded.model.states.elements import RealGated, SelectiveScan
from kvlinker.engines.embedded.model.states.lightning import LightningAttention
from kvlinker.engines.embedded.model.states.rules import Rule
from kvlinker.engines.embedded.model.states.scaled import MatrixMemory, TimeMixing

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

NGRAMS = "_shift_right_ignore_eos"
"""The method by which embeddings of n-grams see the tokens before each."""

FAR_CONVOLUTION = "short_conv_state_len"
"""The tokens before each that the convolution after an embedding of n-grams reaches back to."""

CONVOLVED_PROJECTIONS = "conv_qk_grouped"
"""The module by which Zaya's layers convolve queries and keys, in a module that makes values of the
token before, too."""

REAL_GATES = "_rnn_scan"
"""The method by which an RG-LRU computes its state."""

REAL_GATED = RealGated(
    "forward",
    ("activations",),
    (),
    "activations",
    "returns_state",
    "elements",
    is_held_in_cache=False,
)

TOKEN_SHIFT = "time_shift"
"""The module by which RWKV's layers have each token's neighbour."""

TIME_MIXING_INPUTS = "extract_key_value"
"""The method by which those of RWKV's layers that keep a state make what they write."""

TIME_MIXING = TimeMixing(
    "forward",
    ("hidden",),
    (),
    "hidden",
    "returns_state",
    "elements",
    always_pairs=True,
    takes_channels=False,
    is_held_in_cache=False,
)

RESCALE = "_rescale_layers"
"""The method by which RWKV divides weights before its first pass."""

TOKENS_AT_ONCE = "max_inference_chunksize"
"""The most tokens of a pass that an xLSTM computes together, by its configuration."""

MATRIX_MEMORY_MODULE = "mlstm_backend"
"""The module by which layers of an xLSTM apply their rule."""

MATRIX_MEMORY = MatrixMemory(
    "forward",
    ("query", "key", "value"),
    ("igate", "fgate"),
    "value",
    "returns_state",
    "number",
    always_pairs=True,
    is_held_in_cache=False,
)

OF_RECURRENT_LAYERS = (REAL_GATES, TIME_MIXING_INPUTS, MATRIX_MEMORY_MODULE)
"""What modules of layers have that keep a state and do not say which layer they are."""
