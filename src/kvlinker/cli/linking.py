"""``kvlinker check``, ``policies`` and ``calibrate``: can a model be linked, how, and with how
little recomputation?"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvlinker.cli.bench.common import MODEL_OPTIONS
from kvlinker.cli.console import (
    BAD_USAGE,
    FAILURE,
    fail,
    failures,
    progress_display,
)
from kvlinker.cli.options import settings_options
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings, load_settings

if TYPE_CHECKING:
    from kvlinker.linking import Policy

INDENTED = (0, 0, 0, 4)
"""The padding of texts under a policy's name, in columns: top, right, bottom, left."""


def check(
    model: Annotated[
        str, typer.Argument(help="Folder, GGUF file or Hugging Face hub id.", metavar="MODEL")
    ],
    trust_remote_code: Annotated[
        bool, typer.Option(help="Run code that comes with the model.")
    ] = False,
    weights: Annotated[
        str | None,
        typer.Option(help="With int8: also report how many matrices use 8-bit inputs."),
    ] = None,
) -> None:
    """Compare kvlinker's computation with the model's own, a verdict per check."""
    from rich.console import Console
    from rich.table import Table

    with failures(BAD_USAGE):
        settings = load_settings(model=model, trust_remote_code=trust_remote_code, weights=weights)
    with failures():
        check_model(settings)

    from kvlinker.engines.contract.cost import kv_bytes_per_token
    from kvlinker.engines.embedded.model.bounds import context_window, said_window
    from kvlinker.engines.embedded.model.discovery import anatomy_of
    from kvlinker.engines.embedded.model.interception import ATTENTION_NAME
    from kvlinker.engines.embedded.model.states.kept_states import chunk_bytes
    from kvlinker.engines.embedded.model.weights.arrangement import watch_linears
    from kvlinker.engines.embedded.model.weights.native_quantized import (
        GroupedMatrix,
        multiplied_in_int8,
    )
    from kvlinker.engines.embedded.model.weights.samples import sampled_inputs
    from kvlinker.engines.embedded.model_loading import quicken_model, read_weights
    from kvlinker.engines.embedded.selftest import refusal_after, self_test
    from kvlinker.engines.native import build_here, description

    build_here(settings.native == "build")
    with failures():
        transformer, _, _ = read_weights(settings)
        with sampled_inputs(transformer) as sampled:
            checks = self_test(transformer)
        refusal = refusal_after(transformer, checks)
    table = Table(
        "check",
        "what is compared with the model's own forward pass",
        "relative error",
        "allowed",
        "verdict",
    )
    for item in checks:
        verdict = "[green]passed[/]" if item.passed else "[red]failed[/]"
        table.add_row(item.name, item.meaning, f"{item.error:.1e}", f"{item.allowed:.0e}", verdict)
    Console().print(table)
    if refusal is not None:
        typer.echo(refusal.message, err=True)
        raise typer.Exit(FAILURE)
    window = context_window(transformer)
    typer.echo(f"{model} can be linked, in contexts of up to {window:,} tokens.")
    said = said_window(transformer)
    if said is None:
        typer.echo(
            "The configuration sets no maximum length, and no part of the model depends on one."
        )
    elif window < said:
        typer.echo(
            "The configuration allows longer contexts, but beyond this length the model computes"
            " different results for the same text."
        )
    with watch_linears(transformer) as linear_calls:
        anatomy, dtype = anatomy_of(transformer), transformer.dtype
    kept, name = kv_bytes_per_token(anatomy.layers, dtype), str(dtype).removeprefix("torch.")
    expanded = sum(layer.expanded_values_per_token for layer in anatomy.layers) * dtype.itemsize
    latents = f" as latents, {expanded:,} as keys and values" if expanded != kept else ""
    if kept:
        typer.echo(f"A token's KV takes {kept:,} bytes{latents} ({name}).")
    else:
        typer.echo(f"It has no attention, and tokens no KV ({name}).")
    if anatomy.picks:
        picking = [layer.indexer for layer in anatomy.layers if layer.picker is not None]
        index = sum(each.dim for each in picking if each is not None) * dtype.itemsize
        typer.echo(
            f"In {len(picking)} layers, indexers pick the tokens that queries see; {index:,} of"
            " these bytes are the indexers' own data."
        )
    if anatomy.recurrences:
        maps, whole = (
            chunk_bytes(anatomy, 512, dtype, keeps_inner=keeps) for keeps in (False, True)
        )
        request = sum(each.state_bytes(dtype) for each in anatomy.recurrences)
        typer.echo(
            f"{len(anatomy.recurrences)} layers keep a state, which takes {request:,} bytes of a"
            f" running request. A chunk of 512 tokens takes {whole:,} bytes there. With"
            f" state_inputs=off, a chunk of 512 or more tokens takes {maps:,} bytes."
        )
    transformer.set_attn_implementation(ATTENTION_NAME)
    native = settings.native != "off"
    with failures():
        program = quicken_model(
            transformer,
            anatomy,
            linear_calls,
            settings.weights,
            sampled,
            native=native,
        )
    typer.echo(f"Native code: {description() if native else 'none, for native is off'}.")
    reason = f"the model's modules: {program}" if isinstance(program, str) else "compiled code"
    typer.echo(f"Steps of few tokens are computed by {reason}.")
    in_codes = sum(isinstance(each, GroupedMatrix) for each in transformer.modules())
    if in_codes:
        typer.echo(f"{in_codes} matrices are multiplied by in the codes of the GGUF file.")
    if settings.weights == "int8":
        typer.echo(f"{multiplied_in_int8(transformer)}.")
    _tell_measured(settings)


def _tell_measured(settings: Settings) -> None:
    """Write what a server has measured of the policies with the model."""
    from rich.console import Console
    from rich.table import Table

    from kvlinker.engines.contract.known_models import remembered_fingerprint
    from kvlinker.service.audit.measured import TARGETS, cheapest, figures_kept

    fingerprint = remembered_fingerprint(settings)
    figures = () if fingerprint is None else figures_kept(settings, fingerprint)
    if not figures:
        typer.echo("No policy was measured with it yet: a server does that while it is idle.")
        return
    table = Table("policy", "mean KL to full", "agreement", "recomputed")
    for each in figures:
        shares = f"{each.agreement:.0%}", f"{each.recomputed:.1%}"
        table.add_row(each.policy, f"{each.answer_kl:.3f}", *shares)
    Console().print(table)
    chosen = cheapest(figures, TARGETS[settings.quality])
    typer.echo(f"With quality={settings.quality}, requests that name no policy get {chosen.name}.")


@settings_options("engine")
def policies(
    settings: Settings,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, as GET /v1/policies answers it.")
    ] = False,
) -> None:
    """List the linking policies: how each is written, what it does, what its parameters may be, and
    what the engine cannot follow."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    from kvlinker import linking

    described = linking.describe_policies(_unsupported_by(settings.engine))
    if as_json:
        typer.echo(json.dumps(described, indent=2, ensure_ascii=False))
        return
    console = Console(highlight=False)
    for policy in described:
        console.print(Text(policy["usage"], "bold"), soft_wrap=True)
        console.print(Padding(Text(policy["description"]), INDENTED))
        if policy["restriction"]:
            console.print(Padding(Text(policy["restriction"], "yellow"), INDENTED))
        for row in policy["parameters"]:
            console.print(Padding(Text(f"{row['name']}: {_allowed(row)}", "dim"), INDENTED))
        console.print()
    typer.echo(
        "Policies are joined with +, as in query-5+legolink-4. A token is recomputed if any of"
        " them selects it."
    )


def _unsupported_by(engine: str) -> Callable[[Policy], str | None]:
    """Return the function that says why the engine of this name cannot follow a policy; the
    embedded one follows all."""
    if engine == "vllm":
        from kvlinker.engines.contract.joining import joining_engine

        with failures(BAD_USAGE):
            return joining_engine(engine).unsupported
    return lambda policy: None


@settings_options(*MODEL_OPTIONS)
def calibrate(
    settings: Settings,
    policy: Annotated[
        str,
        typer.Argument(
            help="A policy with {} for the number, such as cachecraft-{}-focus or legolink-{}.",
            metavar="POLICY",
        ),
    ] = "cachecraft-{}",
    target: Annotated[
        float,
        typer.Option(min=0, max=1, help="Wanted score, above 0, as a share of full prefill's."),
    ] = 0.95,
    values: Annotated[
        str | None,
        typer.Option(
            help="Numbers to try, comma-separated; by default a sample of the policy's range."
        ),
    ] = None,
    dataset: Annotated[
        str,
        typer.Option(
            help="Validation set: reader, or a file of questions as bench quality takes it."
        ),
    ] = "reader",
    limit: Annotated[int | None, typer.Option(min=1, help="Most examples.")] = None,
    split: Annotated[
        Literal["semantic", "fixed"],
        typer.Option(help="Chunks are passages, or windows of equal length."),
    ] = "semantic",
    chunk_tokens: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 512,
) -> None:
    """Find the setting of a policy that recomputes least and still reaches a quality, on a
    validation set."""
    from rich.console import Console
    from rich.table import Table

    from kvlinker.quality.bench.harness.benchmark import Setup
    from kvlinker.quality.evaluation.calibration import calibrate, candidates_of, trial_values
    from kvlinker.quality.evaluation.contexts import ContextSplit, ContextSplitter
    from kvlinker.quality.evaluation.datasets import load_dataset
    from kvlinker.quality.evaluation.examiner import Examiner

    if not 0 < target <= 1:
        raise fail(f"--target {target:g} is no share: write one above 0, at most 1", BAD_USAGE)
    with failures(BAD_USAGE):
        policies = candidates_of(
            policy, trial_values(policy) if values is None else values.split(",")
        )
        subject = Setup(settings, command="kvlinker calibrate").subject()
        with subject.llm(disk_space=0) as llm, progress_display() as progress:
            splitter = ContextSplitter(llm.builder.encoder, ContextSplit(split), chunk_tokens)
            examples = load_dataset(dataset, splitter, limit=limit).examples
            found = calibrate(Examiner(llm), examples, policies, target=target, progress=progress)
    table = Table("policy", "examples", "score", "of full", "recomputed")
    for tried in found.candidates:
        style = "bold" if tried == found.chosen else ""
        row = (f"{tried.score:.3f}", f"{tried.of_full:.1%}", f"{tried.recomputed_fraction:.1%}")
        table.add_row(tried.policy, str(tried.n), *row, style=style)
    Console().print(table)
    if found.skipped:
        typer.echo(
            f"{len(found.skipped)} examples skipped, the first: {found.skipped[0].reason}", err=True
        )
    if found.chosen is None:
        typer.echo(
            f"None of them reaches {target:.0%} of full's score. Try other --values.", err=True
        )
        raise typer.Exit(FAILURE)
    typer.echo(
        f"{found.chosen.policy} reaches {target:.0%} of full's score with the least recomputation."
    )


def _allowed(parameter: dict[str, object]) -> str:
    default = "" if parameter["default"] is None else f", {parameter['default']} by default"
    if parameter["type"] == "choice":
        values = parameter["values"]
        assert isinstance(values, list)
        return f"{' or '.join(values)}{default}"
    return f"{parameter['meaning']}, {parameter['minimum']:g} to {parameter['maximum']:g}{default}"
