"""``kvlinker serve``: one model over HTTP."""

from __future__ import annotations

import logging
import shutil
import socket
import time
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING

from pydantic import ByteSize
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.garbage import importing
from kvlinker.base.loading import Loading
from kvlinker.cli.console import BAD_USAGE, ENGINE_FAILED, fail, failures
from kvlinker.cli.loading import shown
from kvlinker.cli.options import settings_options
from kvlinker.cli.running import announced
from kvlinker.doors.http.edge.address import bind, check_address, listen, url_of
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from kvlinker.llm import LLM

LEAST_SECONDS = 60.0
"""The time that an engine has to serve, its start not counted, to be started again."""

logger = logging.getLogger(__name__)


@settings_options(*Settings.model_fields)
def serve(settings: Settings) -> None:
    """Serve a model over HTTP, compatible with OpenAI's API."""
    with failures(BAD_USAGE):
        check_address(settings.host, settings.accepted_keys)
    with failures():
        check_model(settings)
    with failures(), closing(bind(settings.host, settings.port)) as listener:
        _serve(settings, listener)


def _serve(settings: Settings, listener: socket.socket) -> None:
    console = Console(stderr=True, highlight=False, quiet=settings.log_format == "json")
    with importing():
        from kvlinker.doors.http.edge.access_log import logging_to_stderr
        from kvlinker.doors.http.edge.request_spans import provider_from_environment
    listen(listener)
    with logging_to_stderr(settings.log_level, settings.log_format):
        provider = provider_from_environment()
        before: Settings | None = None
        failure: str | None = None
        while True:
            try:
                served, next_model = _serve_until_end(
                    settings, listener, console, provider, failure
                )
            except KVLinkerError as error:
                if before is None:
                    raise
                failure = f"{settings.model} cannot be served: {error.message}"
                logger.error("%s The server goes back to %s.", failure, before.model)
                settings, before = before, None
                continue
            if next_model is not None:
                before, settings, failure = settings, _with_model(settings, next_model), None
                logger.info("Loading %s in the place of %s.", next_model, before.model)
                continue
            if served is None:
                return
            message = "The engine has failed; its messages are above."
            if settings.on_engine_failure == "exit":
                raise fail(
                    f"{message} Start the server again, or set on_engine_failure to restart.",
                    ENGINE_FAILED,
                )
            if served < LEAST_SECONDS:
                raise fail(
                    f"{message} It served for less than {LEAST_SECONDS:.0f} s: it stays so.",
                    ENGINE_FAILED,
                )
            logger.error("%s It is started again.", message)


def _with_model(settings: Settings, model: str) -> Settings:
    """Return the settings for another model, without those that were this one's own."""
    return settings.model_copy(
        update={"model": model, "served_model_name": None, "chat_template": None}
    )


def _serve_until_end(
    settings: Settings,
    listener: socket.socket,
    console: Console,
    provider: TracerProvider | None,
    failure: str | None,
) -> tuple[float | None, str | None]:
    """Start the engine and serve until a signal stops it, until the engine fails (returns the
    seconds for which it has served), or until another model is to be loaded (returns that).
    Requests that come while the model is loaded are answered that it is.

    ``provider`` takes the traces; ``failure`` says why another model is not served.
    """
    loading = Loading(settings.model)
    log = logger.info if settings.log_format == "json" else None
    timeout = settings.request_timeout
    with shown(loading, console, log):
        with importing():
            from kvlinker.doors.http.edge.loading import answering_while_loading
        with answering_while_loading(listener, loading, request_timeout=timeout):
            with importing():
                if settings.engine == "embedded":  # which imports transformers as it needs it
                    import_module("kvlinker.engines.embedded")
                from kvlinker.doors.http.edge.connections import EngineServer, server_config
                from kvlinker.doors.serving import builder_client, create_server
                from kvlinker.llm import LLM
                from kvlinker.quality.policy_measurement import measure_in_background
            llm = LLM.from_settings(
                settings, builders=builder_client(settings), report=loading.report
            )
            app = create_server(llm, settings, provider, failure)
    policy = llm.default_policy().name + _auto_state(llm)
    used = sum(tier.used_bytes for tier in llm.tiers() if tier.name == "disk")
    free = _free_space(settings, used)
    console.print(
        _summary(settings, llm.model_name, llm.max_model_len, policy, url_of(listener), free)
    )
    if settings.log_format == "json":
        logger.info("Serving %s with policy %s at %s", llm.model_name, policy, url_of(listener))
    server = EngineServer(
        server_config(app, request_timeout=timeout),
        listener,
        healthy=lambda: llm.healthy,
        drain=app.state.served.drain,
    )
    began = time.monotonic()
    with (
        announced(settings, url=url_of(listener), model=llm.model_name),
        measure_in_background(llm),
    ):
        server.run()
    seconds = time.monotonic() - began if server.engine_failed else None
    return seconds, app.state.served.drain.next_model


def _auto_state(llm: LLM) -> str:
    """Say whether the default policy was measured, where it is chosen by that."""
    auto = llm.policy_manager.auto
    if auto is None:
        return ""
    if not auto.figures:
        return " (auto: not measured with this model yet)"
    found = ", ".join(f"{each.answer_kl:.3f} {each.policy}" for each in auto.figures)
    return f" (auto: KL {found}; at most {auto.target:g})"


def _free_space(settings: Settings, used: int) -> ByteSize:
    """Return what the file system of the state directory has free, and log where that and the
    ``used`` bytes of chunks are less than what these may take."""
    free = ByteSize(shutil.disk_usage(settings.state_dir).free)
    if used + free < settings.disk_space:
        logger.warning(
            "disk_space is %s, but %s has only %s free. When it is full, the oldest chunks are"
            " evicted. Free some, or set disk_space to %s.",
            settings.disk_space.human_readable(),
            settings.state_dir,
            free.human_readable(),
            ByteSize(used + free // 2).human_readable(),
        )
    return free


def _summary(
    settings: Settings, name: str, window: int, policy: str, address: str, free: ByteSize
) -> Table:
    keys = len(settings.accepted_keys)
    table = Table.grid(padding=(0, 2))
    for title, value in (
        ("model", f"{name} ({window:,} tokens)"),
        *([("weights", settings.weights)] if settings.weights != "auto" else []),
        ("policy", policy),
        (
            "state",
            f"{settings.state_dir} ({settings.disk_space.human_readable()} disk,"
            f" {free.human_readable()} free)",
        ),
        ("memory", f"{settings.host_memory.human_readable()} for chunk caches"),
        *(("shared", place) for place in _shared_places(settings)),
        ("access", f"{keys} API keys" if keys else "loopback only, no API keys"),
        ("address", f"{address} (OpenAI's API at {address}/v1)"),
    ):
        table.add_row(f"[dim]{title}[/dim]", escape(value))
    return table


def _shared_places(settings: Settings) -> list[str]:
    """Return the remote tiers' places, without credentials, and the budget of the object store."""
    from kvlinker.store.redaction import place_of

    places = [] if settings.redis_url is None else [place_of(settings.redis_url.get_secret_value())]
    if settings.object_url and settings.object_space:
        place = place_of(settings.object_url.get_secret_value())
        places.append(f"{place} ({settings.object_space.human_readable()})")
    return places
