"""How commands fail: one clear line on stderr, and exit code 2 for bad usage or 1 for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvlinker.errors import KVLinkerError

BAD_USAGE = 2
FAILURE = 1


def fail(message: str, code: int) -> typer.Exit:
    """Print the message; raise what this returns."""
    typer.echo(f"kvlinker: {message}", err=True)
    return typer.Exit(code)


def warn(message: str) -> None:
    typer.echo(f"kvlinker: warning: {message}", err=True)


@contextmanager
def failures(code: int = FAILURE) -> Iterator[None]:
    """kvlinker's errors end the command with ``code``; others are bugs, and keep their traceback."""
    try:
        yield
    except KVLinkerError as error:
        raise fail(error.message, code) from error
