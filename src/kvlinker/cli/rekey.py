"""kvlinker caches rekey: the state directory under another encryption key, or none."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvlinker.cli.failures import BAD_USAGE, FAILURE, fail, failures
from kvlinker.cli.options import settings_options
from kvlinker.config import Settings


@settings_options("state_dir")
def rekey_caches(
    settings: Settings,
    decrypt: Annotated[bool, typer.Option("--decrypt", help="Take encryption off, instead of a new key.")] = False,
) -> None:
    """Encrypt catalog and chunk files with another key: KVLINKER_NEW_ENCRYPTION_KEY in place of
    KVLINKER_ENCRYPTION_KEY.

    Without the old key, what is not encrypted yet becomes so. No server may run on the state directory meanwhile. A run
    that is interrupted is finished by another with the same keys. Chunks in tiers that servers share are computed
    again.
    """
    from kvlinker.store.format.encryption import NEW_KEY_VARIABLE, load_cipher
    from kvlinker.store.rekeying import rekey

    key = os.environ.get(NEW_KEY_VARIABLE)
    if (key is not None) == decrypt:
        raise fail(f"give the new key in {NEW_KEY_VARIABLE}, or --decrypt to take encryption off", BAD_USAGE)
    catalog = settings.state_dir / "catalog.sqlite"
    if not catalog.is_file():
        raise fail(f"nothing is stored in {settings.state_dir}", FAILURE)
    columns = (TextColumn("chunk files"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with failures(), Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        old = load_cipher(settings.encryption_key)
        new = None if key is None else load_cipher(SecretStr(key), NEW_KEY_VARIABLE)
        task = progress.add_task("", total=None)
        done = rekey(
            catalog,
            settings.state_dir / "chunks",
            old,
            new,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    typer.echo(f"catalog: {'decrypted' if new is None else 'encrypted with the new key'}")
    typer.echo(f"chunk files: {done.written} written anew, {done.finished_before} were so before")
    if done.removed:
        typer.echo(f"{done.removed} opened with neither key and were removed (computed again when used)")
