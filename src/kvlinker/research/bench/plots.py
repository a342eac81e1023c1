"""What is better seen than read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlinker.errors import InvalidRequestError
from kvlinker.research.bench.report import Row
from kvlinker.research.evaluation.metrics import METRICS


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """TTFT over context length where there are several lengths, else a bar per policy.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not know.
    """
    figure = empty_figure(7, 4.5)
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
    save_figure(figure, path)


def _label(policy: str, engine: str) -> str:
    return policy if engine == "embedded" else f"{policy} ({engine})"


def plot_store(rows: Sequence[Row], path: Path) -> None:
    """Time to first token by tier, codec and policy, beside the host tier's. Raises InvalidRequestError as
    ``plot_ttft`` does."""
    shown = [row for row in rows if row["ratio_to_host"] is not None and row["policy"]]
    policies = list(dict.fromkeys(row["policy"] for row in shown))
    figure = empty_figure(8, 1 + 0.28 * len(shown))
    panels = figure.subplots(len(policies), 1, squeeze=False).flatten()
    for axes, policy in zip(panels, policies, strict=True):
        bars_of = [row for row in shown if row["policy"] == policy]
        labels = [" ".join(filter(None, (row["tier"], row["codec"], row["case"]))) for row in bars_of]
        bars = axes.barh(labels, [row["ms"] for row in bars_of])
        axes.bar_label(bars, [f"{row['ratio_to_host']:.2f}×" for row in bars_of], padding=3)
        axes.margins(x=0.12)
        axes.invert_yaxis()
        axes.set(title=policy)
    panels[-1].set(xlabel="ms")
    save_figure(figure, path)


def plot_quality(rows: Sequence[Row], path: Path) -> None:
    """Score over recomputed share, a panel per data set and task and a point per policy, with confidence intervals.

    ``rows`` have one metric per task. Raises InvalidRequestError as ``plot_ttft`` does.
    """
    tasks = list(dict.fromkeys((row["dataset"], row["task"], row["metric"]) for row in rows))
    across = min(len(tasks), 3)
    down = -(-len(tasks) // across)
    figure = empty_figure(4.5 * across, 3.6 * down)
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, (dataset, task, metric) in zip(panels, tasks, strict=False):
        for row in rows:
            if (row["dataset"], row["task"]) == (dataset, task):
                reach = [[row["score"] - row["ci_low"]], [row["ci_high"] - row["score"]]]
                axes.errorbar(100 * row["recomputed_fraction"], row["score"], reach, marker="o", label=row["policy"])
        title = dataset if task == dataset else f"{dataset}: {task}"
        axes.set(xlabel="recomputed (% of cached tokens)", ylabel=metric, title=title)
        if metric in METRICS:  # others are no shares
            axes.set_ylim(0, 1.02)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6)
    save_figure(figure, path)


def empty_figure(width: float, height: float) -> Any:
    """Inches. Raises InvalidRequestError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidRequestError("Plots need matplotlib: pip install 'kvlinker[bench]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Raises InvalidRequestError for a file name whose ending matplotlib does not know."""
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise InvalidRequestError(f"Cannot write {path}: {error}", param="plot") from error
