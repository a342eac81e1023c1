"""Measures the time per decoded token, alone and in a batch, by weight format, beside transformers'
own decoding, and what of it is outside of the model."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import AnswerGrammar
from kvlinker.base.types.sampling import SamplingFields
from kvlinker.engines.contract.contract import Engine
from kvlinker.linking import parse_policy
from kvlinker.prompting.segments import Prompt
from kvlinker.quality.bench.harness.benchmark import (
    ChunkTokens,
    Repeat,
    Setup,
    WeightFormats,
    benchmark,
    counts,
    names,
)
from kvlinker.quality.bench.harness.measurement import (
    START_TOKENS,
    Workload,
    cache_chunks,
    decode_step,
    in_turn,
    transformers_decode_step,
)
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.progress import Progress, silent

COLUMNS = (
    "case",
    "system",
    "sampling",
    "ms_per_step",
    "ratio",
    "outside_ms",
    "outside_cpu_ms",
    "outside_%",
)
FRESH_TOKENS = 32
"""The tokens behind the chunks: the default of the benchmarks."""

RECORDS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "tags"],
    },
}
"""The schema of answers that follow one."""

SAMPLING: Mapping[str, SamplingFields] = {
    "plain": {},
    "drawn": {"temperature": 0.8, "top_p": 0.95, "seed": 0},
    "json": {"grammar": AnswerGrammar.json_schema(RECORDS)},
    "logprobs": {"logprobs": 5},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop": {"stop": ("\n\n", "Question:")},
}
"""Sampling parameters of requests, by name. Tokens are the likeliest, unless they are drawn."""

Batches = Mapping[int, Sequence[Prompt]]
"""As many prompts as each batch has, by their number."""


class Case(NamedTuple):
    """A case of one system."""

    batch: int
    sampling: str


class Taken(NamedTuple):
    """The time of a step."""

    seconds: float
    outside: Mapping[str, float] = MappingProxyType({})
    """The seconds outside of the model, by the columns that report them; empty where the system
    does not report them."""


@benchmark("decode")
def decode(
    setup: Setup,
    *,
    batches: Annotated[str, typer.Option(help="Batch sizes, with commas between.")] = "1,4,16",
    context_tokens: Annotated[
        int, typer.Option(min=1, help="Prompt length of each request, without --chunks.")
    ] = 512,
    chunks: Annotated[
        int,
        typer.Option(
            min=0, help="Cached chunks that all requests share, before 32 fresh tokens; 0: none."
        ),
    ] = 0,
    chunk_tokens: ChunkTokens = 512,
    policy: Annotated[
        str | None, typer.Option(help="How chunks are linked; by default as requests are.")
    ] = None,
    steps: Annotated[int, typer.Option(min=4, help="Tokens to decode.")] = 24,
    formats: WeightFormats = "",
    sampling: Annotated[
        str,
        typer.Option(help=f"What requests ask for, with commas between: {', '.join(SAMPLING)}."),
    ] = "plain",
    repeat: Repeat = 5,
) -> Report:
    """Measure the time per decoded token, by weight format, beside transformers' own cached
    decoding.

    Of a step, "outside" is what kvlinker does between two forward passes: it composes the step,
    chooses tokens, and tells them. "outside_cpu" is the part of that in which it computes, and
    does not wait for a processor.
    With --chunks, requests decode behind linked chunks that they share, and transformers takes no
    part.
    """
    sizes, samplings = counts(batches), names(sampling)
    unknown = [name for name in samplings if name not in SAMPLING]
    if unknown or not samplings:
        raise InvalidRequestError(
            f"--sampling is {sampling!r}; known are {', '.join(SAMPLING)}.", param="sampling"
        )
    workload = (
        Workload(chunks, chunk_tokens, FRESH_TOKENS) if chunks else Workload(0, 1, context_tokens)
    )
    linked_by = parse_policy(policy or setup.settings.usual_policy).name if chunks else "full"
    subjects = setup.subjects(names(formats), repeat=repeat, steps=steps, policy=linked_by)
    plain = None if chunks else setup.transformer()
    return run_decode(
        subjects,
        sizes,
        workload,
        plain=plain,
        policy=linked_by,
        sampling=samplings,
        steps=steps,
        repeat=repeat,
        progress=setup.progress,
    )


def run_decode(
    subjects: Mapping[str, MeasuredModel],
    batches: Sequence[int],
    workload: Workload,
    *,
    plain: Any = None,
    policy: str = "full",
    sampling: Sequence[str] = ("plain",),
    steps: int,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Decode ``steps`` tokens for each batch size, all systems in turn, ``repeat`` times after one
    warm-up.

    ``subjects`` hold the model in the weight formats to compare; ratios are to the first. ``plain``
    is the model as transformers has it; None: transformers takes no part, as where there are
    chunks. Requests have the workload's chunks in common, linked by ``policy``, and ask for each
    ``sampling`` in turn. A system computes in a thread that ends with its turn: the OpenMP pools of
    two would slow both down.
    """
    first, *_ = subjects.values()
    prompts = {size: workload.prompts(first.loaded.vocabulary, size) for size in batches}
    systems: dict[str, Callable[[], dict[Case, Taken]]] = {
        f"kvlinker {form}": partial(_in_kvlinker, subject, prompts, policy, sampling, steps)
        for form, subject in subjects.items()
    }
    if plain is not None:
        systems["transformers"] = partial(_in_transformers, plain, prompts, steps)
    taken = in_turn(systems, repeat=repeat, progress=progress)
    rows: list[Row] = []
    for size in batches:
        reference: float | None = None
        for system, turns in taken.items():
            for case in (case for case in turns[0] if case.batch == size):
                median = statistics.median(turn[case].seconds for turn in turns)
                reference = reference or median
                outside = [turn[case].outside for turn in turns]
                rows.append(
                    {
                        "case": decode_case(size, workload),
                        "system": system,
                        "sampling": case.sampling,
                        "ms_per_step": 1e3 * median,
                        "ratio": median / reference,
                        **{
                            column: statistics.median(values[column] for values in outside)
                            for column in outside[0]
                        },
                    }
                )
    return replace(first.report(rows), columns=COLUMNS)


def decode_case(batch: int, workload: Workload) -> str:
    """Name the decoding requests, and the tokens before them."""
    if workload.chunks:
        return (
            f"{batch} × {workload.chunks} × {workload.chunk_tokens} shared +"
            f" {workload.fresh_tokens}"
        )
    return f"{batch} × {workload.fresh_tokens}"


def _in_kvlinker(
    subject: MeasuredModel,
    prompts: Batches,
    policy: str,
    sampling: Sequence[str],
    steps: int,
) -> dict[Case, Taken]:
    """Return what a step takes, by an engine that is started for it."""
    slots = max(size * (len(batch[0]) + steps + START_TOKENS) for size, batch in prompts.items())
    with subject.llm(kv_slots=slots) as llm:
        first, *_ = prompts.values()
        cache_chunks(llm.engine, first[0])
        return {
            Case(size, name): _step(llm.engine, batch, policy, SAMPLING[name], steps)
            for size, batch in prompts.items()
            for name in sampling
        }


def _step(
    engine: Engine, prompts: Sequence[Prompt], policy: str, sampling: SamplingFields, steps: int
) -> Taken:
    """Return what a step takes in which every prompt gets a token."""
    from kvlinker.engines.embedded.engine import EmbeddedEngine

    assert isinstance(engine, EmbeddedEngine), engine
    engine.step_times.clear()
    seconds = decode_step(engine, prompts, policy, steps=steps, sampling=sampling)
    times = [
        time for time in engine.step_times.copy() if time.requests == time.tokens == len(prompts)
    ]
    outside = {
        "outside_ms": 1e3 * statistics.median(time.outside for time in times),
        "outside_cpu_ms": 1e3 * statistics.median(time.outside_cpu for time in times),
        "outside_%": 1e2 * statistics.median(time.share for time in times),
    }
    return Taken(seconds, outside)


def _in_transformers(model: Any, prompts: Batches, steps: int) -> dict[Case, Taken]:
    """Return what a step takes."""
    from kvlinker.engines.embedded.model.interception import attention_of

    with attention_of(model, "sdpa"):
        return {
            Case(size, "plain"): Taken(
                transformers_decode_step(
                    model, np.stack([prompt.tokens for prompt in batch]), steps=steps
                )
            )
            for size, batch in prompts.items()
        }
