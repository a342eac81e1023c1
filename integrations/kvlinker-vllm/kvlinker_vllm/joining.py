"""Implements ``kvlinker.engines.contract.joining.JoiningEngine``: what the core asks of vLLM as an
engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kvlinker.engines.contract.contract import Engine
    from kvlinker.linking import Policy
    from kvlinker.settings import Settings
    from kvlinker_vllm.frontend.source import VLLMSource


def make_source(settings: Settings) -> VLLMSource:
    """Return a source with vLLM in processes of its own. Raises InvalidRequestError and
    ModelLoadError."""
    from kvlinker_vllm.frontend.source import own_vllm

    return own_vllm(settings)


def unsupported(policy: Policy) -> str | None:
    """Return why vLLM cannot follow a policy; None if it can."""
    from kvlinker_vllm.protocol import transfer_plan

    return transfer_plan.unsupported(policy)


def add_routes(app: FastAPI, engine: Engine, settings: Settings) -> None:
    """Add vLLM's own routes to kvlinker's application."""
    from kvlinker_vllm.server.other_routes import add_other_routes

    add_other_routes(app, engine, settings)


def shared_settings(settings: Settings, engines: int) -> dict[str, Any]:
    """Return the settings with which ``engines`` engines have room on one machine."""
    from kvlinker_vllm.frontend.configuration import shared_options

    return {"vllm_options": shared_options(settings, engines)}
