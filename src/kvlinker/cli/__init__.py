"""The ``kvlinker`` command. Commands are imported when they run, and by them the modules that need
torch."""

from __future__ import annotations

from importlib.metadata import entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

import typer

from kvlinker.base.commit import commit
from kvlinker.cli.lazy import ModuleGroup

EXTRAS = {"fleet": "fleet", "router": "fleet"}
"""The extras that bring commands of this project's other packages, by command."""


class Commands(ModuleGroup):
    """All commands of ``kvlinker``, with those of installed packages: entry points of the group
    ``kvlinker.commands``."""

    places: ClassVar = {
        "run": "kvlinker.cli.chat.command:run",
        "serve": "kvlinker.cli.serve:serve",
        "ps": "kvlinker.cli.servers:ps",
        "stop": "kvlinker.cli.servers:stop",
        "pull": "kvlinker.cli.models:pull",
        "models": "kvlinker.cli.models:models",
        "service": "kvlinker.cli.service:app",
        "ingest": "kvlinker.cli.documents.ingest:ingest",
        "search": "kvlinker.cli.documents.search:search",
        "ask": "kvlinker.cli.documents.search:ask",
        "check": "kvlinker.cli.linking:check",
        "policies": "kvlinker.cli.linking:policies",
        "calibrate": "kvlinker.cli.linking:calibrate",
        "caches": "kvlinker.cli.caches:app",
        "bench": "kvlinker.cli.bench:app",
        **{
            point.name: point.value
            for point in entry_points(group="kvlinker.commands")
            if find_spec(point.module.partition(".")[0])  # metadata may outlive its package
        },
    }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command to be run. Names the extra to install for one that is missing."""
        name = args[0]
        if name in EXTRAS and name not in self.places:
            from kvlinker.base.installing import install_command
            from kvlinker.cli.console import BAD_USAGE, fail

            command = install_command(EXTRAS[name])
            raise fail(f"kvlinker {name} is a command of kvlinker-fleet: {command}", BAD_USAGE)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="kvlinker",
    help="A linker for KV caches: text chunks are computed once, and linked into any prompt.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    cls=Commands,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from kvlinker.engines.native import description

        print(f"{version('kvlinker')} (commit {commit()}; native code: {description()})")
        raise typer.Exit


@app.callback()
def main(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Print the version, its commit, and the native code that is used.",
        ),
    ] = False,
) -> None:
    pass
