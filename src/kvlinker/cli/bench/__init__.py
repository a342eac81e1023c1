"""``kvlinker bench``: measure, print a table, write JSON, draw a plot. Each benchmark registers itself."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from kvlinker.cli.bench.common import app

__all__ = ["app"]


def load_all() -> None:
    """Import every module of this package, whose benchmarks register themselves."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        import_module(module.name)


load_all()
