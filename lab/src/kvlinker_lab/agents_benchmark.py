"""Measures hand-overs between agents: what one writes is in the next one's prompt, in a store that
has room for everything, or for a third of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.quality.bench.harness.benchmark import Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row, empty_figure, save_figure
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.agents.cases import STORES, SYSTEMS, Case, open_case
from kvlinker_lab.agents.scenarios import SCENARIOS, Turn, Work

COLUMNS = (
    "scenario",
    "store",
    "system",
    "n",
    "ttft_ms",
    "vs_marks",
    "sooner",
    "computed",
    "slow",
    "evicted",
    "spared",
    "ahead_s",
)

SLO = 2.0
"""The limit of a slow first token, in idle medians of the policy with marks. Chosen by hand."""


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the time to the first token of hand-overs, by scenario and system, and the share of slow
    ones."""
    figure = empty_figure(9, 3.4)
    panels = figure.subplots(1, 3)
    shown = (
        ("ttft_ms", "idle", "first token, ms, idle store"),
        ("ttft_ms", "crowded", "first token, ms, crowded store"),
        ("slow", "crowded", "slow first tokens, crowded store"),
    )
    scenarios = list(dict.fromkeys(row["scenario"] for row in rows))
    for axes, (column, store, title) in zip(panels, shown, strict=True):
        for index, system in enumerate(SYSTEMS):
            found = {
                row["scenario"]: row[column]
                for row in rows
                if (row["store"], row["system"]) == (store, system)
            }
            places = [place + 0.2 * index for place in range(len(scenarios))]
            axes.bar(places, [found[name] for name in scenarios], width=0.18, label=system)
        axes.set_xticks([place + 0.3 for place in range(len(scenarios))], scenarios)
        axes.set_title(title, fontsize="medium")
    slowest = max(row["ttft_ms"] for row in rows)
    for axes in panels[:2]:
        axes.set_ylim(0, 1.05 * slowest)
    panels[2].set_ylim(0, 1.02)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(SYSTEMS))
    save_figure(figure, path)


@benchmark("agents", plot=plot)
def agents(
    setup: Setup,
    *,
    workflows: Annotated[int, typer.Option(min=1, help="Workflows that take turns.")] = 3,
    document_tokens: Annotated[int, typer.Option(min=32, help="Tokens per document.")] = 256,
    answer_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 24,
    policy: Annotated[str, typer.Option(help="How kept answers are linked.")] = "legolink-4",
    scenarios: Annotated[
        str, typer.Option(help="Only these, with commas between.", show_default=False)
    ] = "",
) -> Report:
    """Measure first tokens of hand-overs between agents: with prefix reuse alone, with documents as
    chunks that are linked naively, with answers as chunks, too, and with hints of what comes next.

    All systems and stores take turns, request by request, so that what else the machine does meets
    all alike; ratios are medians over hand-overs of the same turns.
    """
    subject = setup.subject(
        workflows=workflows,
        document_tokens=document_tokens,
        answer_tokens=answer_tokens,
        policy=policy,
    )
    wanted = [name.strip() for name in scenarios.split(",") if name.strip()] or list(SCENARIOS)
    if unknown := [name for name in wanted if name not in SCENARIOS]:
        raise typer.BadParameter(
            f"Unknown scenario {unknown[0]!r}; known are {', '.join(SCENARIOS)}."
        )
    work = Work(workflows, document_tokens, answer_tokens, policy)
    asked = {name: SCENARIOS[name] for name in wanted}
    return run_agents(subject, work, asked, progress=setup.progress)


def run_agents(
    subject: MeasuredModel,
    work: Work,
    scenarios: Mapping[str, Sequence[Turn]] = SCENARIOS,
    *,
    progress: Progress = silent,
) -> Report:
    """Ask the scenarios of all systems, in both stores."""
    rows: list[Row] = []
    for scenario, turns in scenarios.items():
        with ExitStack() as running:
            cases = [
                running.enter_context(open_case(subject, work, turns, system, store))
                for store in STORES
                for system in SYSTEMS
            ]
            for step in range(len(turns) * work.workflows):
                progress(scenario, step + 1, len(turns) * work.workflows)
                for place in range(len(cases)):
                    cases[(step + place) % len(cases)].ask(step % work.workflows)
        rows += _rows(scenario, {(case.store, case.system): case for case in cases})
    return replace(subject.report(rows), columns=COLUMNS)


def _rows(scenario: str, cases: Mapping[tuple[str, str], Case]) -> list[Row]:
    """Return the measurements of one scenario, by store and system."""
    most = SLO * statistics.median(_seconds(cases["idle", "marks"]))
    rows: list[Row] = []
    for (store, system), case in cases.items():
        seconds = _seconds(case)
        usages = [answer.usage for turn, answer in case.answers if turn.hears]
        computed = sum(usage.recomputed_tokens + usage.fresh_tokens for usage in usages)
        rows.append(
            {
                "scenario": scenario,
                "store": store,
                "system": system,
                "n": len(seconds),
                "ttft_ms": 1000 * statistics.median(seconds),
                "vs_marks": _ratio(seconds, _seconds(cases[store, "marks"])),
                "sooner": _ratio(_seconds(cases[store, "prefix"]), seconds),
                "computed": computed / sum(usage.prompt_tokens for usage in usages),
                "slow": sum(each > most for each in seconds) / len(seconds),
                "evicted": case.evicted,
                "spared": case.spared,
                "ahead_s": case.ahead / len(case.answers),
            }
        )
    return rows


def _seconds(case: Case) -> list[float]:
    """Return the seconds to the first tokens of requests that have other agents' answers."""
    return [answer.timing.ttft for turn, answer in case.answers if turn.hears]


def _ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median ratio of the same hand-overs' times."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))
