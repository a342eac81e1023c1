"""``kvlinker check``: can this model be linked exactly?"""

from __future__ import annotations

from typing import Annotated

import typer

from kvlinker.cli.failures import FAILURE, failures
from kvlinker.config import load_settings


def check(
    model: Annotated[str, typer.Argument(help="Local path or Hugging Face hub id.")],
    trust_remote_code: Annotated[bool, typer.Option(help="Run code that comes with the model.")] = False,
) -> None:
    """Compare kvlinker's computation with the model's own, a verdict per check."""
    from rich.console import Console
    from rich.table import Table

    from kvlinker.embedded.model.selftest import self_test
    from kvlinker.engine.model_files import read_model

    with failures(FAILURE):
        transformer, _ = read_model(load_settings(model=model, trust_remote_code=trust_remote_code))
        checks = self_test(transformer)
    table = Table("check", "what is compared with the model's own forward pass", "relative error", "allowed", "verdict")
    for item in checks:
        verdict = "[green]passed[/]" if item.passed else "[red]failed[/]"
        table.add_row(item.name, item.meaning, f"{item.error:.1e}", f"{item.tolerance:.0e}", verdict)
    Console().print(table)
    if not all(item.passed for item in checks):
        typer.echo(f"{model} cannot be linked exactly.", err=True)
        raise typer.Exit(FAILURE)
    typer.echo(f"{model} can be linked.")
