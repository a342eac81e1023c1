"""``kvlinker bench``: how fast the engine is, and what it costs in memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from kvlinker.cli.bench.common import (
    MODEL_OPTIONS,
    ChunkTokens,
    FreshTokens,
    Json,
    Plot,
    Policies,
    Repeat,
    Shape,
    UsualPolicies,
    command_line,
    counts,
    policy_names,
    register,
    show,
    usual_policies,
)
from kvlinker.cli.console import BAD_USAGE, failures, progress_line
from kvlinker.config import Settings


@register(*MODEL_OPTIONS)
def ttft(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[str, typer.Option(help="Chunks per prompt; several numbers with commas sweep the length.")] = "8",
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: UsualPolicies = None,
    tier: Annotated[str, typer.Option(help="Where the chunk caches lie: host or disk.")] = "host",
    full_limit: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt that full prefill takes part in, in tokens.")
    ] = None,
    repeat: Repeat = 5,
    json: Json = None,
    plot: Plot = None,
) -> None:
    """Time to first token of prompts made of cached chunks, by policy, and where it goes.

    With --engine vllm, vLLM's beside the embedded engine's, and the time between tokens of a neighbour that decodes
    meanwhile.
    """
    from kvlinker.research.bench.plots import plot_ttft
    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.bench.ttft import COLUMNS, Workload, run_ttft, scaling_exponents

    with failures(BAD_USAGE), progress_line() as progress:
        workloads = [Workload(count, chunk_tokens, fresh_tokens) for count in counts(chunks)]
        names = usual_policies(policies, settings)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        with_vllm = settings.engine == "vllm"
        report = run_ttft(
            subject,
            workloads,
            names,
            repeat=repeat,
            tier=tier,
            full_limit=full_limit,
            with_transformers=not with_vllm,
            progress=progress,
        )
        if with_vllm:
            from kvlinker.research.bench.vllm_ttft import COLUMNS as VLLM_COLUMNS
            from kvlinker.research.bench.vllm_ttft import run_vllm_ttft

            rows = run_vllm_ttft(subject, settings, workloads, names, repeat=repeat, progress=progress)
            report = replace(report, rows=[*report.rows, *rows])
    show(report, VLLM_COLUMNS if with_vllm else COLUMNS, json)
    for (policy, engine), exponent in scaling_exponents(report.rows).items():
        typer.echo(f"{policy} ({engine}): TTFT ~ tokens^{exponent:.2f}")
    if plot is not None:
        with failures(BAD_USAGE):
            plot_ttft(report.rows, plot)


@register(*MODEL_OPTIONS)
def decode(
    settings: Settings,
    shape: Shape = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4",
    context_tokens: Annotated[int, typer.Option(min=1, help="Prompt length of each request.")] = 512,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    repeat: Repeat = 5,
    json: Json = None,
) -> None:
    """Time per decoded token, beside transformers' own cached decoding."""
    from kvlinker.research.bench.decode import COLUMNS, run_decode
    from kvlinker.research.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        sizes = counts(batches)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat, steps=steps)
        report = run_decode(
            subject, sizes, context_tokens=context_tokens, steps=steps, repeat=repeat, progress=progress
        )
    show(report, COLUMNS, json)


@register(*MODEL_OPTIONS)
def memory(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 32,
    policies: Policies = "naive,legolink-16,full",
    json: Json = None,
) -> None:
    """Peak memory of one request, beside the KV that it needs in any case."""
    from kvlinker.research.bench.memory import COLUMNS, run_memory
    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.bench.ttft import Workload

    with failures(BAD_USAGE), progress_line() as progress:
        names = policy_names(policies)
        subject = make_subject(settings, shape=shape, command=command_line())
        report = run_memory(subject, Workload(chunks, chunk_tokens, fresh_tokens), names, progress=progress)
    show(report, COLUMNS, json)


@register(*MODEL_OPTIONS)
def creation(
    settings: Settings,
    shape: Shape = None,
    chunk_tokens: ChunkTokens = 512,
    repeat: Repeat = 9,
    json: Json = None,
) -> None:
    """Time to compute a chunk, with and without the attention scores that some policies use."""
    from kvlinker.research.bench.creation import COLUMNS, run_creation
    from kvlinker.research.bench.subject import make_subject

    with failures(BAD_USAGE), progress_line() as progress:
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_creation(subject, chunk_tokens=chunk_tokens, repeat=repeat, progress=progress)
    show(report, COLUMNS, json)


@register(*MODEL_OPTIONS)
def overhead(
    settings: Settings,
    shape: Shape = None,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of the prompt.")] = 8,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[str, typer.Option(help="Linking policy.")] = "legolink-16",
    repeat: Repeat = 15,
    json: Json = None,
) -> None:
    """What HTTP adds to a request, beside the same request in Python."""
    from kvlinker.research.bench.overhead import COLUMNS, run_overhead
    from kvlinker.research.bench.subject import make_subject
    from kvlinker.research.bench.ttft import Workload

    with failures(BAD_USAGE), progress_line() as progress:
        (name,) = policy_names(policy)
        subject = make_subject(settings, shape=shape, command=command_line(), repeat=repeat)
        report = run_overhead(subject, Workload(chunks, chunk_tokens, 32), name, repeat=repeat, progress=progress)
    show(report, COLUMNS, json)
