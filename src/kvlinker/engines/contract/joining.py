"""Engines of other packages, which join by the entry points of the group ``kvlinker.engines``."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, cast

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.installing import install_command

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvlinker.engines.contract.contract import Engine
    from kvlinker.linking import Policy
    from kvlinker.settings import Settings

GROUP = "kvlinker.engines"


class JoiningEngine(Protocol):
    """The module that an entry point names: what the core asks of an engine besides to compute."""

    def make_source(self, settings: Settings) -> Any:
        """Return the ``EngineSource`` for a server of its own. Raises InvalidRequestError and
        ModelLoadError."""

    def unsupported(self, policy: Policy) -> str | None:
        """Return why the engine cannot follow a policy; None if it can."""

    def add_routes(self, app: FastAPI, engine: Engine, settings: Settings) -> None:
        """Add the engine's own routes to kvlinker's application."""

    def shared_settings(self, settings: Settings, engines: int) -> dict[str, Any]:
        """Return the settings with which ``engines`` engines have room on one machine."""


def is_installed(name: str) -> bool:
    """Return whether a package brings the engine of this name. Imports nothing of it."""
    return bool(entry_points(group=GROUP, name=name))


def joining_engine(name: str) -> JoiningEngine:
    """Return the engine that an installed package brings. Raises InvalidRequestError if none
    does."""
    for point in entry_points(group=GROUP, name=name):
        return cast(JoiningEngine, point.load())
    raise InvalidRequestError(
        f"The engine {name} is not installed here. Run {install_command(name)}, or see docs/vllm.md"
        " for CPUs.",
        param="engine",
    )
