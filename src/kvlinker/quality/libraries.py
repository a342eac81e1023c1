"""Imports the libraries that only measurements need, and says how to get them where they are
missing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command


def bench_library(module: str) -> Any:
    """Import a module of a library in the extra ``bench``. Raises InvalidRequestError if it is not
    installed."""
    try:
        return import_module(module)
    except ImportError as error:
        library = module.partition(".")[0].replace("_", "-")
        raise InvalidRequestError(
            f"This needs the library {library}: {install_command('bench')}."
        ) from error
