"""Makes routing in a fleet a benchmark: its options, its table and its plot."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.bench.harness.benchmark import Setup, benchmark, counts, names
from kvlinker.quality.bench.harness.report import (
    Report,
    Row,
    describe_machine,
    empty_figure,
    save_figure,
    versions,
)
from kvlinker.quality.progress import Progress, silent
from kvlinker_lab.fleet.live import FORMS, run_live
from kvlinker_lab.fleet.others import Approximate, BoundedHash, DualMap, LlmdPrefix, RayPrefix
from kvlinker_lab.fleet.replicas import Costs, Fleet
from kvlinker_lab.fleet.rules import LeastLoaded, Resident, RoundRobin, Rule
from kvlinker_lab.fleet.simulation import Event, Simulation
from kvlinker_lab.fleet.traffic import CHUNKS, ORDERS, TOPIC, prompts
from kvlinker_lab.load.servers import model_to_serve

RULES: Mapping[str, Callable[[Fleet, Costs, int], Rule]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "ray_prefix": RayPrefix,
    "llmd_prefix": LlmdPrefix,
    "approximate": Approximate,
    "bounded_hash": BoundedHash,
    "dualmap": DualMap,
    "resident": Resident,
}

COLUMNS = (
    "case",
    "replicas",
    "event",
    "form",
    "resident_percent",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "copies",
    "lost",
    "cut",
    "resident_percent_after",
    "ttft_p99_ms_after",
    "lookups",
    "computed_chunks",
    "cached_percent",
)

EVENTS = ("none", "death", "join", "join+preload")


def plot_fleet(rows: Sequence[Row], path: Path) -> None:
    """Draw the share of resident chunks by rule and size of the fleet and, where it was simulated,
    the 99th percentile of the time to first token.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not
    know.
    """
    panels_of = [
        (column, label)
        for column, label in (
            ("resident_percent", "resident chunks (%)"),
            ("ttft_p99_ms", "TTFT, 99th percentile (ms)"),
        )
        if column in rows[0]
    ]
    figure = empty_figure(5 * len(panels_of), 4)
    panels = figure.subplots(1, len(panels_of), squeeze=False)[0]
    sizes = list(dict.fromkeys(row["replicas"] for row in rows))
    places = np.arange(len(sizes))
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for axes, (column, label) in zip(panels, panels_of, strict=True):
        for index, case in enumerate(cases):
            heights = [
                next((r[column] for r in rows if (r["case"], r["replicas"]) == (case, size)), 0)
                for size in sizes
            ]
            axes.bar(places + 0.8 * index / len(cases), heights, 0.8 / len(cases), label=case)
        axes.set_xticks(places + 0.4, [f"{size:,}" for size in sizes])
        axes.set(xlabel="replicas", ylabel=label)
        axes.set_yscale("log" if column == "ttft_p99_ms" else "linear")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path)


@benchmark("fleet", plot=plot_fleet)
def fleet(
    setup: Setup,
    *,
    replicas: Annotated[str, typer.Option(help="Sizes of fleets, with commas between.")] = "4,16",
    rules: Annotated[
        str, typer.Option(help=f"Rules to compare, with commas between: {', '.join(RULES)}.")
    ] = ",".join(RULES),
    events: Annotated[
        str, typer.Option(help=f"What happens, with commas between: {', '.join(EVENTS)}.")
    ] = "none",
    share: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of replicas that end or join, not all.")
    ] = 0.25,
    order: Annotated[
        str, typer.Option(help=f"The chunks of prompts: {' or '.join(ORDERS)}.")
    ] = "retrieved",
    load: Annotated[
        float, typer.Option(min=0.05, help="Arrivals over what the fleet can do at 60% resident.")
    ] = 0.7,
    room: Annotated[int, typer.Option(min=8, help="Chunks in each replica's memory.")] = 1000,
    disk_room: Annotated[int, typer.Option(min=0, help="Chunks on its disk.")] = 0,
    requests: Annotated[int, typer.Option(min=10, help="Requests per replica.")] = 1000,
    link_ms: Annotated[
        float, typer.Option(min=0.01, help="A prompt whose chunks are all resident.")
    ] = 12.2,
    chunk_ms: Annotated[float, typer.Option(min=0, help="Computing a chunk of 512 tokens.")] = 8.7,
    load_ms: Annotated[float, typer.Option(min=0, help="Loading a chunk from disk.")] = 4.0,
    answer_ms: Annotated[
        float, typer.Option(min=0, help="From the first to the last token.")
    ] = 2000,
    busy: Annotated[
        float, typer.Option(min=0, help="Share by which an answer under way slows a prompt.")
    ] = 0.0,
    report_seconds: Annotated[
        float, typer.Option(min=0, help="From one report to the next.")
    ] = 1.0,
    live: Annotated[
        bool, typer.Option(help="Real servers on this machine instead, of the configured model.")
    ] = False,
    forms: Annotated[
        str, typer.Option(help="How real servers get chunks: documents, or plain text.")
    ] = ",".join(FORMS),
    seed: Annotated[int, typer.Option(help="Of arrivals and prompts.")] = 0,
) -> Report:
    """Simulate a fleet whose corpus is as large as all its memory together, and compare rules.

    The default costs are those of an 8B model on an H100, by NVIDIA's table for TensorRT-LLM 1.0
    (Llama 3.1 8B in FP8: 3,450 tokens a second behind prompts of 2,048, 28,312 behind 128). No
    model is run, unless --live starts servers, which share this machine's processors: there, counts
    tell more than times.
    """
    import torch

    sizes = counts(replicas)
    compared = [_check_name(rule, RULES) for rule in names(rules)]
    settings: dict[str, Any]
    if live:
        with model_to_serve(setup.settings, setup.shape) as served:
            rows = [
                row
                for form, size in product(
                    [_check_name(form, FORMS) for form in names(forms)], sizes
                )
                for row in run_live(
                    served,
                    size,
                    {rule: RULES[rule] for rule in compared},
                    form=form,
                    order=_check_name(order, ORDERS),
                    requests=requests,
                    seed=seed,
                    progress=setup.progress,
                )
            ]
        model = setup.shape or served.served_name
        settings = {"model": model, "order": order, "requests": requests}
    else:
        if setup.shape is not None:
            raise InvalidRequestError(
                f"--shape {setup.shape}: no model runs in a simulation; --live starts servers.",
                param="shape",
            )
        if min(sizes) * room < TOPIC:
            raise InvalidRequestError(
                f"--room {room}: {min(sizes)} replicas hold less than a document's {TOPIC} chunks.",
                param="room",
            )
        costs = Costs(link_ms / 1e3, chunk_ms / 1e3, load_ms / 1e3, answer_ms / 1e3, busy)
        rows = run_fleet(
            sizes,
            compared,
            costs,
            events=[_check_name(event, EVENTS) for event in names(events)],
            share=share,
            order=_check_name(order, ORDERS),
            load=load,
            room=room,
            disk_room=disk_room,
            requests=requests,
            report_seconds=report_seconds,
            seed=seed,
            progress=setup.progress,
        )
        settings = {
            "order": order,
            "load": load,
            "room": room,
            "disk_room": disk_room,
            "requests": requests,
            "link_ms": link_ms,
            "chunk_ms": chunk_ms,
            "load_ms": load_ms,
            "answer_ms": answer_ms,
            "busy": busy,
            "report_seconds": report_seconds,
        }
    return Report(
        command=setup.command,
        machine=describe_machine(torch.device("cpu")),
        versions=versions(),
        settings=settings,
        rows=rows,
        columns=COLUMNS,
    )


def _check_name(name: str, known: Collection[str]) -> str:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return name


def run_fleet(
    sizes: Sequence[int],
    rules: Sequence[str],
    costs: Costs,
    *,
    load: float,
    room: int,
    requests: int,
    report_seconds: float,
    seed: int,
    events: Sequence[str] = ("none",),
    share: float = 0.25,
    order: str = "retrieved",
    disk_room: int = 0,
    progress: Progress = silent,
) -> list[Row]:
    """Simulate each rule and event on the same requests, for each size of the fleet."""
    rows: list[Row] = []
    for size in sizes:
        asked = list(prompts(size * room, size * requests, seed, order=order))
        rate = load * size / (costs.link + 0.4 * CHUNKS * costs.chunk)
        gaps = np.random.default_rng(seed + 1).exponential(1 / rate, len(asked))
        arrivals = np.cumsum(gaps).tolist()
        for kind, rule in product(events, rules):
            progress(f"{size} replicas, {rule}, {kind}")
            event = Event(kind.partition("+")[0], share, preloads=kind.endswith("preload"))
            simulated = Fleet(size, room, disk_room)
            simulation = Simulation(
                simulated,
                RULES[rule](simulated, costs, seed),
                costs,
                event=event,
                report_seconds=report_seconds,
            )
            served = simulation.run(asked, arrivals, seed)
            rows.append({"case": rule, "replicas": size, "event": kind, **served})
    return rows
