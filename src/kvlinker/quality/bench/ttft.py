"""Measures the time to first token of prompts made of cached chunks, policy by policy, and where
that time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command
from kvlinker.base.profiling import Profile
from kvlinker.base.threads import in_own_thread
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    ComparedPolicies,
    FreshTokens,
    Repeat,
    Setup,
    benchmark,
    compared_policies,
    counts,
    supported_policies,
)
from kvlinker.quality.bench.harness.measurement import (
    Workload,
    cache_chunks,
    check_cold_reads,
    chunk_files,
    copy_bandwidth,
    drop_from_page_cache,
    first_token,
    greedy_request,
    in_turn,
    matmul_rate,
)
from kvlinker.quality.bench.harness.report import Report, Row, empty_figure, save_figure
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    from torch import nn

    from kvlinker.engines.embedded.engine import EmbeddedEngine
    from kvlinker.engines.embedded.model.loaded import LoadedModel

ChunkCounts = Annotated[
    str, typer.Option(help="Chunks per prompt; several numbers with commas sweep the length.")
]
ChunkTier = Annotated[
    str, typer.Option(help="Where the chunk caches are: host, or disk, with an empty page cache.")
]
FullLimit = Annotated[
    int | None,
    typer.Option(min=1, help="Longest prompt that full prefill takes part in, in tokens."),
]

SPARE_SLOTS = 1024
"""The KV slots beyond those of the longest prompt, for its answer and for rounding to blocks."""

PARTS = ("load", "select", "attention", "matmul", "rest")
COLUMNS = (
    "policy",
    "engine",
    "context_tokens",
    "recomputed_tokens",
    "ttft_ms",
    "speedup",
    "floor_ms",
    *(f"{part}_ms" for part in PARTS),
)


def plot_ttft(rows: Sequence[Row], path: Path) -> None:
    """Draw TTFT over context length where there are several lengths, else a bar per policy.

    Raises InvalidRequestError without matplotlib, and for a file name whose ending it does not
    know.
    """
    figure = empty_figure(7, 4.5)
    axes = figure.subplots()
    if len({row["context_tokens"] for row in rows}) > 1:
        for label in dict.fromkeys(map(_label, rows)):
            points = [
                (row["context_tokens"], row["ttft_ms"]) for row in rows if _label(row) == label
            ]
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="prompt length (tokens)",
            ylabel="time to first token (ms)",
        )
        axes.legend()
    else:
        bars = axes.barh([_label(row) for row in rows], [row["ttft_ms"] for row in rows])
        axes.bar_label(
            bars, [f"{row['speedup']:.1f}×" if row["speedup"] else "" for row in rows], padding=3
        )
        axes.margins(x=0.1)
        axes.invert_yaxis()
        axes.set(
            xlabel="time to first token (ms)",
            title=f"{rows[0]['context_tokens']} tokens of context",
        )
    save_figure(figure, path)


def _label(row: Row) -> str:
    return (
        str(row["policy"]) if row["engine"] == "embedded" else f"{row['policy']} ({row['engine']})"
    )


@benchmark("ttft", plot=plot_ttft)
def ttft(
    setup: Setup,
    *,
    chunks: ChunkCounts = "8",
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: ComparedPolicies = None,
    tier: ChunkTier = "host",
    full_limit: FullLimit = None,
    repeat: Repeat = 5,
) -> Report:
    """Measure the time to first token of prompts made of cached chunks, by policy, and where it
    goes."""
    if setup.settings.engine == "vllm":
        raise InvalidRequestError(
            "kvlinker bench ttft measures the embedded engine. Run kvlinker bench ttft-vllm, which"
            f" compares vLLM with it. {install_command('vllm')} installs that command.",
            param="engine",
        )
    workloads = [Workload(count, chunk_tokens, fresh_tokens) for count in counts(chunks)]
    named = compared_policies(policies, setup.settings)
    subject = setup.subject(repeat=repeat)
    if policies is None:
        named = supported_policies(named, subject.loaded)
    report = run_ttft(
        subject,
        workloads,
        named,
        repeat=repeat,
        tier=tier,
        full_limit=full_limit,
        progress=setup.progress,
    )
    return with_growth(report)


def with_growth(report: Report) -> Report:
    """Add to a report how the time to first token grows with the length of prompts."""
    growth = scaling_exponents(report.rows).items()
    return replace(
        report,
        notes=[f"{name} ({engine}): TTFT ~ tokens^{power:.2f}" for (name, engine), power in growth],
    )


def run_ttft(
    subject: MeasuredModel,
    workloads: Sequence[Workload],
    policies: Sequence[str],
    *,
    repeat: int,
    tier: str = "host",
    full_limit: int | None = None,
    with_transformers: bool = True,
    progress: Progress = silent,
) -> Report:
    """Measure every policy on every workload, in turn, ``repeat`` times after one warm-up; medians
    are reported, and the parts of one request more.

    ``full`` is left out of prompts longer than ``full_limit``. transformers' own forward pass of
    the same prompt takes part whenever ``full`` does, unless ``with_transformers`` is false. With
    the tier ``disk``, chunks are read with an empty page cache; raises InvalidRequestError if that
    cannot be emptied, and for a tier that is unknown.
    """
    from kvlinker.engines.embedded.engine import EmbeddedEngine

    if tier == "disk":
        check_cold_reads()
    loaded = subject.loaded
    bandwidth = copy_bandwidth(loaded.device)
    rate = matmul_rate(loaded.dtype, loaded.device)
    rows: list[Row] = []
    longest = max(workload.tokens for workload in workloads)
    with subject.llm(kv_slots=longest + 2 * SPARE_SLOTS, tier=tier) as llm:
        engine = llm.engine
        assert isinstance(engine, EmbeddedEngine)
        forget = partial(_forget_files, llm.settings.state_dir) if tier == "disk" else None
        for workload in workloads:
            prompt = workload.prompt(loaded.model.config.vocab_size)
            progress(f"{len(prompt)} tokens: caching {workload.chunks} chunks")
            cache_chunks(engine, prompt)
            for name in policies:
                if parse_policy(name).needs.places:
                    first_token(engine, prompt, name)
                    progress(f"{len(prompt)} tokens: chunks at later places")
                    engine.settle().result()
            llm.store.flush()
            with_full = full_limit is None or len(prompt) <= full_limit
            competitors = {
                ("embedded", name): policy_measurement(engine, prompt, name, before=forget)
                for name in policies
                if with_full or name != "full"
            }
            if with_transformers and ("embedded", "full") in competitors:
                competitors["transformers", "full"] = partial(_measure_transformers, loaded, prompt)
            if engine.runner.graphed is not None:
                progress("capturing graphs")
                for measure in (*competitors.values(), *competitors.values()):
                    measure()
            taken = in_turn(
                competitors,
                repeat=repeat,
                what=partial(_step_name, len(prompt)),
                progress=progress,
            )
            progress(f"{len(prompt)} tokens: parts")
            parts = {
                name: _parts(engine, loaded, prompt, name, forget)
                for system, name in competitors
                if system == "embedded"
            }
            rows += _rows(
                engine,
                workload,
                prompt,
                taken,
                parts,
                tier=tier,
                kv_bytes_per_token=loaded.kv_bytes_per_token,
                bandwidth=bandwidth,
                rate=rate,
            )
    report = subject.report(
        rows, copy_gb_per_s=round(bandwidth / 1e9, 1), matmul_tflop_per_s=round(rate / 1e12, 3)
    )
    return replace(report, columns=COLUMNS)


def _step_name(tokens: int, competitor: tuple[str, str]) -> str:
    system, policy = competitor
    return f"{policy} ({system}), {tokens} tokens"


def scaling_exponents(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Fit ttft = a · tokens^b, and return b by (policy, engine), where there are three lengths or
    more."""
    lengths: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        lengths.setdefault((row["policy"], row["engine"]), []).append(
            (row["context_tokens"], row["ttft_ms"])
        )
    return {
        key: statistics.linear_regression(*zip(*np.log(points).tolist(), strict=True)).slope
        for key, points in lengths.items()
        if len({length for length, _ in points}) >= 3
    }


def _rows(
    engine: EmbeddedEngine,
    workload: Workload,
    prompt: Prompt,
    taken: Mapping[tuple[str, str], Sequence[float]],
    parts: Mapping[str, Mapping[str, float]],
    *,
    tier: str,
    kv_bytes_per_token: int,
    bandwidth: float,
    rate: float,
) -> list[Row]:
    """Make a row for each system and policy.

    ``floor_ms`` is what no implementation can beat: KV read and written once, and all arithmetic at
    matmul speed. ``parts`` are those of each policy's time.
    """
    medians = {key: statistics.median(seconds) for key, seconds in taken.items()}
    full = medians.get(("embedded", "full"))
    rows: list[Row] = []
    for system, policy in taken:
        cost = engine.explain(greedy_request(prompt, policy)).result().cost
        ttft = medians[system, policy]
        row = {
            "policy": policy,
            "engine": system,
            "context_tokens": len(prompt),
            "chunks": workload.chunks,
            "fresh_tokens": workload.fresh_tokens,
            "tier": tier,
            "ttft_ms": 1e3 * ttft,
            "speedup": None if full is None else full / ttft,
            "recomputed_tokens": cost.recomputed_tokens,
            "floor_ms": 1e3
            * (2 * cost.cached_tokens * kv_bytes_per_token / bandwidth + cost.flops / rate),
        }
        if system == "embedded":
            row |= {f"{part}_ms": 1e3 * parts[policy].get(part, 0.0) for part in PARTS}
        rows.append(row)
    return rows


def policy_measurement(
    engine: EmbeddedEngine,
    prompt: Prompt,
    policy: str,
    *,
    before: Callable[[], object] | None = None,
) -> Callable[[], float]:
    """Return what measures the seconds to the first token, after ``before``; the engine must be
    idle otherwise."""

    def measure() -> float:
        if before is not None:
            before()
        return first_token(engine, prompt, policy).seconds

    return measure


def _parts(
    engine: EmbeddedEngine,
    loaded: LoadedModel,
    prompt: Prompt,
    policy: str,
    before: Callable[[], object] | None,
) -> dict[str, float]:
    """Measure the seconds of each part of one time to first token, whose steps the model's modules
    compute, so that each can be told apart."""
    if before is not None:
        before()
    profile = Profile()
    engine.runner.profile = profile
    handles = _time_linears(loaded.model, profile)
    try:
        measured = first_token(engine, prompt, policy)
    finally:
        for handle in handles:
            handle.remove()
        engine.runner.profile = None
    parts = dict(profile.seconds) | {"load": measured.timing.load}
    return parts | {"rest": measured.seconds - sum(parts.values())}


def _forget_files(state_dir: Path) -> None:
    """Empty the page cache of chunk files, so that the disk itself is read."""
    drop_from_page_cache(chunk_files(state_dir))


@in_own_thread
def _measure_transformers(loaded: LoadedModel, prompt: Prompt) -> float:
    """Measure transformers' own forward pass of the whole prompt, with its SDPA attention and a KV
    cache kept."""
    import torch

    from kvlinker.engines.embedded.model.interception import attention_of

    ids = torch.from_numpy(prompt.tokens)[None].to(loaded.device)
    torch.ones(1 << 20).add_(1)  # begins this thread's pool
    with torch.inference_mode(), attention_of(loaded.model, "sdpa"):
        begin = time.perf_counter()
        output = loaded.model(input_ids=ids, use_cache=True, logits_to_keep=1)
        output.logits.argmax().item()
        return time.perf_counter() - begin


def _time_linears(model: nn.Module, profile: Profile) -> list[Any]:
    """Hook all linear layers, so that their time is added to the profile; return the hooks'
    handles."""
    from torch import nn

    began = 0.0

    def before(*_: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def after(*_: Any) -> None:
        profile.seconds["matmul"] += time.perf_counter() - began

    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [m.register_forward_pre_hook(before) for m in linears] + [
        m.register_forward_hook(after) for m in linears
    ]
