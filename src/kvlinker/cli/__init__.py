"""The ``kvlinker`` command. Modules that need torch are imported by the commands that run them, not from here."""

from kvlinker.cli.commands import app

__all__ = ["app"]
