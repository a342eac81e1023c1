"""``python -m kvlinker`` is the command ``kvlinker``."""

from __future__ import annotations

from kvlinker.cli import app

if __name__ == "__main__":
    app(prog_name="kvlinker")
