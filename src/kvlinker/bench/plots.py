"""What is better seen than read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlinker.bench.report import Row
from kvlinker.errors import InvalidRequestError


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """TTFT over context length where there are several lengths, else a bar per policy.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not know.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequestError("--plot needs matplotlib: pip install 'kvlinker[bench]'.") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    competitors = list(dict.fromkeys((row["policy"], row["engine"]) for row in rows))
    if len({row["context_tokens"] for row in rows}) > 1:
        for policy, engine in competitors:
            points = [
                (r["context_tokens"], r["ttft_ms"]) for r in rows if (r["policy"], r["engine"]) == (policy, engine)
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=_label(policy, engine))
        axes.set(xscale="log", yscale="log", xlabel="prompt length (tokens)", ylabel="time to first token (ms)")
        axes.legend()
    else:
        labels = [_label(row["policy"], row["engine"]) for row in rows]
        bars = axes.barh(labels, [row["ttft_ms"] for row in rows])
        axes.bar_label(bars, [f"{row['speedup']:.1f}×" if row["speedup"] else "" for row in rows], padding=3)
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set(xlabel="time to first token (ms)", title=f"{rows[0]['context_tokens']} tokens of context")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error}", param="plot") from error


def _label(policy: str, engine: str) -> str:
    return policy if engine == "embedded" else f"{policy} ({engine})"
