"""Rows of the store's benchmark."""

from __future__ import annotations

from kvlinker.quality.bench.harness.report import Row

COLUMNS = (
    "tier",
    "codec",
    "policy",
    "case",
    "ms",
    "bytes",
    "ratio_to_host",
    "ratio",
    "beside",
    "bandwidth",
    "hidden_percent",
)


def store_row(
    tier: str,
    case: str,
    seconds: float | None,
    *,
    codec: str = "",
    policy: str = "",
    nbytes: int | None = None,
    host: float | None = None,
    beside: tuple[str, float] | None = None,
) -> Row:
    """``host``: seconds of the same case in the host tier. ``beside``: another case's name and its
    seconds."""
    return {
        "tier": tier,
        "codec": codec,
        "policy": policy,
        "case": case,
        "ms": None if seconds is None else 1e3 * seconds,
        "bytes": nbytes,
        "ratio_to_host": None if host is None or seconds is None else seconds / host,
        "ratio": None if beside is None or seconds is None else seconds / beside[1],
        "beside": None if beside is None else beside[0],
    }
