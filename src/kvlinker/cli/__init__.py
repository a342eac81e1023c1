"""The ``kvlinker`` command. Modules that need torch are imported by the commands that run them, not from here."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from kvlinker.cli import bench, caches
from kvlinker.cli.advise import advise
from kvlinker.cli.certify import certify
from kvlinker.cli.documents.ingest import ingest
from kvlinker.cli.documents.search import ask, search
from kvlinker.cli.linking import calibrate, check, policies
from kvlinker.cli.serve import serve
from kvlinker.cli.top import top

app = typer.Typer(
    name="kvlinker",
    help="A linker for KV caches: text chunks are computed once, and linked into any prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(version("kvlinker"))
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command()(serve)
app.command()(top)
app.command()(ingest)
app.command()(search)
app.command()(ask)
app.command()(check)
app.command()(certify)
app.command()(policies)
app.command()(calibrate)
app.command()(advise)
app.add_typer(caches.app, name="caches")
app.add_typer(bench.app, name="bench")
