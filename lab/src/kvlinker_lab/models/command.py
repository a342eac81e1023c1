"""``kvlinker-lab models``: which classes of models can be linked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.console import BAD_USAGE, failures, progress_display


def models(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(help="Names of configurations, as llama; by default all.", metavar="KIND"),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(help="Write the table into this page.", exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Try a small random model of every causal language model class of transformers: is it
    linked?"""
    from kvlinker.base.errors import InvalidRequestError
    from kvlinker_lab.models.small_models import KINDS
    from kvlinker_lab.models.verdicts import counts, table, verdict, write_table

    with failures(BAD_USAGE):
        unknown = sorted(set(kinds or ()) - set(KINDS))
        if unknown:
            raise InvalidRequestError(f"transformers has no causal model {', '.join(unknown)}.")
        found = []
        with progress_display() as progress:
            for kind in kinds or KINDS:
                progress(kind)
                found.append(verdict(kind))
        if page is None:
            typer.echo(f"{table(found)}\n\n{counts(found)}")
        else:
            write_table(page, found)
            typer.echo(counts(found))
