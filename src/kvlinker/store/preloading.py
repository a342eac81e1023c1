"""How many layers have to be there before computation may begin (Cache-Craft, section 4.3, equation 16)."""

from __future__ import annotations

from math import ceil


def preload_depth(layers: int, *, compute_seconds: float, load_seconds: float) -> int:
    """L_p = (L - 1)(1 - T_prefill / T_load) + 1: layers to wait for, so that none is missing when its turn comes.

    ``compute_seconds``: T_prefill, all layers' computation. ``load_seconds``: T_load, reading all layers. At least 1,
    at most ``layers``.
    """
    if load_seconds <= 0:
        return 1
    hidden = min(1.0, max(0.0, compute_seconds / load_seconds))
    return min(layers, ceil((layers - 1) * (1 - hidden)) + 1)
