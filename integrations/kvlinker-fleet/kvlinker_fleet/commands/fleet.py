"""``kvlinker fleet``: several replicas as one server, on Ray Serve."""

from __future__ import annotations

import secrets
import signal
import time
from contextlib import closing
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvlinker.base import machine
from kvlinker.base.installing import install_command
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, output_console
from kvlinker.cli.options import settings_options
from kvlinker.cli.running import announced
from kvlinker.doors.client import Client
from kvlinker.doors.http.edge.address import bind, check_address, url_of
from kvlinker.engines.contract.joining import joining_engine
from kvlinker.engines.contract.model_place import check_model
from kvlinker.settings import Settings
from kvlinker_fleet.ray_serve.environment import prepare
from kvlinker_fleet.ray_serve.options import FleetOptions, check, key_of_fleet, read_options

app = typer.Typer(help="Serve a model by several replicas as by one server, on Ray Serve.")

_POLL_SECONDS = 0.1
"""The seconds between two looks whether a signal has come."""


@app.callback(invoke_without_command=True)
@settings_options(*Settings.model_fields)
def fleet(
    settings: Settings,
    context: typer.Context,
    replicas: Annotated[int | None, typer.Option(help="How many there are; 2 by default.")] = None,
    min_replicas: Annotated[
        int | None, typer.Option(help="The least, where their number follows the load.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(help="The most, where their number follows the load.")
    ] = None,
    target_requests: Annotated[
        float, typer.Option(help="Requests under way in each replica, beyond which there are more.")
    ] = 8.0,
    target_ttft: Annotated[
        float | None,
        typer.Option(help="Seconds to the first token, beyond which there are more."),
    ] = None,
    upscale_delay: Annotated[
        float, typer.Option(help="Seconds of load before there are more.")
    ] = 10.0,
    downscale_delay: Annotated[
        float, typer.Option(help="Seconds of rest before there are fewer.")
    ] = 120.0,
    build_replicas: Annotated[
        int, typer.Option(help="How many more there are that compute chunks for the others.")
    ] = 0,
    ingresses: Annotated[
        int, typer.Option(help="Processes that take requests and pass them on.")
    ] = 2,
    cpus: Annotated[
        float | None,
        typer.Option(
            help="Processors, and so threads, of each replica; an equal share on one machine."
        ),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(help="GPUs of each replica; as many as its engine uses by default."),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            help="A Ray cluster that this machine is part of, which then keeps the fleet running;"
            " without, Ray is started here.",
            metavar="HEAD:6379",
        ),
    ] = None,
) -> None:
    """Serve a model by several replicas as by one server, on Ray Serve.

    They share the state directory on one machine, and a catalog and a tier for chunks on several
    (catalog_url, redis_url). Each request goes to the replica that has its chunks in memory.
    """
    if context.invoked_subcommand is not None:
        return
    if replicas is not None and (min_replicas is not None or max_replicas is not None):
        raise fail("--replicas is a number that stays: leave out the others", BAD_USAGE)
    if find_spec("ray") is None:
        raise fail(f"kvlinker fleet needs Ray: {install_command('fleet')}", BAD_USAGE)
    if replicas is min_replicas is max_replicas is None:
        replicas = 2
    given: dict[str, Any] = {
        "replicas": replicas,
        "min_replicas": 1 if min_replicas is None else min_replicas,
        "max_replicas": (min_replicas or 1) if max_replicas is None else max_replicas,
        "target_requests": target_requests,
        "target_ttft": target_ttft,
        "upscale_delay": upscale_delay,
        "downscale_delay": downscale_delay,
        "build_replicas": build_replicas,
        "ingresses": ingresses,
        "cpus": cpus,
        "gpus": gpus,
        "settings": {name: getattr(settings, name) for name in settings.model_fields_set},
    }
    with failures(BAD_USAGE):
        check_address(settings.host, settings.accepted_keys)
        options = read_options(given)
        check(options, settings)
        if address is not None:
            key_of_fleet(settings)
    with failures():
        check_model(settings)
        if address is None:
            _serve_here(settings, options)
        else:
            _deploy(address, settings, options)


def _serve_here(settings: Settings, options: FleetOptions) -> None:
    """Run Ray and the fleet on this machine until a signal stops them."""
    prepare(alone=True)
    from kvlinker_fleet.ray_serve.cluster import deploy, own_ray, remove

    console = Console(stderr=True, highlight=False, quiet=settings.log_format == "json")
    bind(settings.host, settings.port).close()  # which fails if the address is taken
    with closing(bind(settings.host, settings.port, shared=True)) as reserved:
        options = _share_machine(settings, options, port=reserved.getsockname()[1])
        with console.status("Starting Ray"), own_ray(options) as running:
            console.print(f"Starting {options.most_models} replicas of {settings.model}")
            deploy(running)
            url = url_of(reserved)
            console.print(_summary(settings, options, url))
            signals: list[int] = []
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda number, _: signals.append(number))
            with announced(settings, url=url, model=settings.served_name):
                while not signals:
                    time.sleep(_POLL_SECONDS)
            remove(settings.drain_timeout, at_once=lambda: len(signals) > 1)


def _deploy(address: str, settings: Settings, options: FleetOptions) -> None:
    """Give the fleet to a Ray cluster, which keeps it running."""
    prepare(alone=False)
    from kvlinker_fleet.ray_serve.cluster import connect_ray, deploy

    with connect_ray(address):
        deploy(options)
    typer.echo(
        f"The fleet runs on the Ray cluster at {address}, port {settings.port} of"
        f" {options.ingresses} of its machines; `serve shutdown` ends it.",
        err=True,
    )


def _share_machine(settings: Settings, options: FleetOptions, port: int) -> FleetOptions:
    """Return the options of a fleet on one machine, whose replicas share its processors and its
    memory, and whose ingresses know a key of the replicas."""
    shares = options.most_models
    own: dict[str, Any] = {"port": port}
    if "host_memory" not in settings.model_fields_set:
        own["host_memory"] = settings.host_memory // shares
    if settings.api_keys and not settings.admin_keys:
        own["admin_keys"] = (secrets.token_urlsafe(32),)
    if settings.engine == "vllm":
        own |= joining_engine(settings.engine).shared_settings(settings, shares)
    cpus = options.cpus or settings.threads or max(1, machine.processors() // shares)
    return options.model_copy(update={"cpus": cpus, "settings": options.settings | own})


def _summary(settings: Settings, options: FleetOptions, url: str) -> Table:
    keys = len(settings.accepted_keys)
    number = (
        f"{options.min_replicas} to {options.max_replicas}, by load"
        if options.replicas is None
        else str(options.replicas)
    )
    table = Table.grid(padding=(0, 2))
    for title, value in (
        ("model", settings.served_name),
        ("replicas", f"{number}, each with {options.cpus:g} processors"),
        *([("builders", str(options.build_replicas))] if options.build_replicas else []),
        ("ingresses", str(options.ingresses)),
        ("policy", settings.policy),
        ("state", str(settings.state_dir)),
        ("access", f"{keys} API keys" if keys else "loopback only, no API keys"),
        ("address", f"{url} (OpenAI's API at {url}/v1)"),
    ):
        table.add_row(f"[dim]{title}[/dim]", escape(value))
    return table


@app.command()
def status(
    url: Annotated[str, typer.Option(help="The fleet.")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="KVLINKER_API_KEY", help="Any key that it accepts.")
    ] = None,
) -> None:
    """List the replicas of a fleet, or of a router's servers."""
    with failures(), Client(url, api_key) as client:
        answer = client.server_status()
    if "replicas" not in answer:
        raise fail(f"{url} is a single server", FAILURE)
    table = Table(box=None, pad_edge=False)
    for title in ("replica", "role", "state"):
        table.add_column(title)
    for title in ("running", "waiting", "chunks", "pid"):
        table.add_column(title, justify="right")
    table.add_column("reason")
    for replica in answer["replicas"]:
        table.add_row(
            replica["id"],
            replica["role"],
            replica["state"],
            *(str(replica[name]) for name in ("running", "waiting", "resident_chunks")),
            str(replica["pid"] or "-"),
            replica["reason"] or "",
        )
    output_console().print(table)
