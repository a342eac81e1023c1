"""``kvlinker-lab certify``: measures a policy with a model, and writes a certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.bench.common import MODEL_OPTIONS, QUALITY_OPTIONS, command_line, require_folders
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, progress_display
from kvlinker.cli.options import settings_options
from kvlinker.settings import Settings

EMBEDDED_OPTIONS = tuple(name for name in MODEL_OPTIONS if name not in ("engine", "vllm_options"))
STORE_OPTIONS = (
    "policy",
    "state_dir",
    "host_memory",
    "disk_space",
    "disk_codec",
    "encryption_key",
)


@settings_options(*EMBEDDED_OPTIONS, *QUALITY_OPTIONS, *STORE_OPTIONS)
def certify(
    settings: Settings,
    target: Annotated[
        float,
        typer.Option(
            min=0.5,
            max=0.9999,
            help="Wanted share of answers that agree with the full computation.",
        ),
    ] = 0.98,
    dataset: Annotated[
        list[str] | None,
        typer.Option(
            help="As bench quality takes it; reader by default, may be repeated.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Most examples of each data set.")
    ] = None,
    prompts: Annotated[
        int, typer.Option(min=0, help="Prompts of chunks that the store holds.")
    ] = 100,
    out: Annotated[
        Path | None,
        typer.Option(
            help="JSON file to write, and a page next to it; in the state directory by default.",
            show_default=False,
            dir_okay=False,
        ),
    ] = None,
) -> None:
    """Measure a policy with a model, and write a certificate: JSON, and a page with plots.

    The self-test, answers on data sets, and answers about chunks that the store holds are compared
    with the full computation. Ends with 1 if the agreement's exact 95% interval does not lie above
    the target.
    """
    from kvlinker.quality.bench.harness.report import empty_figure
    from kvlinker.service.audit.certificate import certificate_path
    from kvlinker_lab.certification.measurement import certify as measure
    from kvlinker_lab.certification.page import certificate_page

    with failures(BAD_USAGE):
        require_folders(out)
    if out is not None and out.suffix == ".html":
        raise fail(f"--out {out} is the page's name: give that of the JSON file", BAD_USAGE)
    with failures(BAD_USAGE), progress_display() as progress:
        empty_figure(1, 1)  # where matplotlib is missing, better now than after the run
        certificate = measure(
            settings,
            target=target,
            datasets=dataset or ("reader",),
            limit=limit,
            prompts=prompts,
            command=command_line("kvlinker-lab"),
            progress=progress,
        )
        path = out or certificate_path(
            settings.state_dir, certificate.fingerprint, certificate.policy
        )
        certificate.write(path)
        page = path.with_suffix(".html")
        page.write_text(certificate_page(certificate), encoding="utf-8")
    found = certificate.agreement
    typer.echo(
        f"{found.agreeing} of {found.samples} answers agree: {found.agreement:.1%} "
        f"({found.ci_low:.1%} to {found.ci_high:.1%}); the target is {target:.1%}."
    )
    typer.echo(f"{path}\n{page}")
    if not certificate.passed:
        typer.echo(f"{certificate.policy} is not certified with {certificate.model}.", err=True)
        raise typer.Exit(FAILURE)
    typer.echo(f"{certificate.policy} is certified with {certificate.model}.")
