"""``kvlinker service``: a server that systemd keeps running for this user."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvlinker.cli.console import FAILURE, fail
from kvlinker.engines.contract.gguf_files import from_anywhere

app = typer.Typer(help="Have systemd keep a server running for this user.", no_args_is_help=True)

UNIT = "kvlinker.service"

TEXT = """\
# Written by `kvlinker service install`, which writes it anew; `kvlinker service remove` removes it.
[Unit]
Description=kvlinker, a linker for KV caches

[Service]
Type=exec
ExecStart={command}
# 2 is a wrong setting, which another start does not mend.
Restart=on-failure
RestartSec=5
RestartPreventExitStatus=2
# The server's drain_timeout (25 s), and its last writes.
TimeoutStopSec=60
KillMode=mixed
UMask=0077
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


@app.command()
def install(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, GGUF file or Hugging Face hub id; the shipped model by default.",
            metavar="MODEL",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings.", exists=True, dir_okay=False),
    ] = None,
) -> None:
    """Install a unit of systemd for this user, and start it: a server that is restarted when it
    fails, and started when the user logs in.

    Settings and keys come from the file; the environment of this command is not kept. Installing
    again replaces the unit.
    """
    words = [sys.executable, "-m", "kvlinker", "serve"]
    if model is not None:
        words += ["--model", from_anywhere(model)]
    if config is not None:
        words += ["--config", str(config.resolve())]
    place = _place()
    _systemctl("show-environment")  # which fails where there is no manager for this user
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(TEXT.format(command=" ".join(map(_quoted, words))), encoding="utf-8")
    _systemctl("daemon-reload")
    _systemctl("enable", UNIT)
    _systemctl("restart", UNIT)
    typer.echo(f"{place} is installed and started.")
    typer.echo(
        "kvlinker: `journalctl --user -u kvlinker -f` shows its log, `kvlinker ps` its address;"
        " `loginctl enable-linger` keeps it running while you are logged out",
        err=True,
    )


@app.command()
def remove() -> None:
    """Stop the server of systemd, and remove its unit. What it has stored is kept."""
    place = _place()
    if not place.exists():
        raise fail(f"there is no {place}", FAILURE)
    _systemctl("disable", "--now", UNIT)
    place.unlink()
    _systemctl("daemon-reload")
    typer.echo(f"{place} is stopped and removed.")


def _place() -> Path:
    """Return where systemd looks for the unit of this user."""
    folder = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(folder, "systemd", "user", UNIT)


def _quoted(word: str) -> str:
    """Write a word of a command as systemd reads it: % and $ stand for themselves."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _systemctl(*arguments: str) -> None:
    """Run ``systemctl`` for this user; a failure ends the command."""
    if shutil.which("systemctl") is None:
        raise fail("there is no systemd here: start `kvlinker serve` by other means", FAILURE)
    ran = subprocess.run(
        ["systemctl", "--user", *arguments], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        said = ran.stderr.strip() or f"it ended with {ran.returncode}"
        raise fail(f"systemctl --user {' '.join(arguments)}: {said}", FAILURE)
