"""Ray itself: started in this process for one machine, or joined where it runs; and the fleet on
it."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import ray
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.schema import LoggingConfig

from kvlinker.base.errors import KVLinkerError
from kvlinker_fleet.ray_serve.application import INGRESS_CPUS, build
from kvlinker_fleet.ray_serve.options import FleetOptions
from kvlinker_fleet.ray_serve.serving import LAST_SECONDS

APPLICATION = "kvlinker"

OBJECT_STORE_BYTES = 80 * 2**20
"""The memory that Ray reserves for objects, about the least that it takes: a fleet has none."""

LAST_LINES_SECONDS = 1.0
"""The wait for the last lines of processes that have ended."""

_POLL_SECONDS = 0.2
"""The seconds between two looks whether the fleet has ended."""

_OWN_ERROR = re.compile(r"^kvlinker\.[\w.]+Error: ", re.MULTILINE)
"""The beginning of an error of kvlinker's, in the last line of a traceback."""


logging.getLogger("ray.serve").setLevel(logging.WARNING)


class FleetError(KVLinkerError):
    """Raised where Ray, or the fleet on it, does not start."""

    code = "fleet_failed"


@contextmanager
def own_ray(options: FleetOptions) -> Iterator[FleetOptions]:
    """Start Ray in this process, for as long as the block runs; returns the options with those that
    its processes need. Their logs come out on this process's stderr."""
    cpus = options.most_models * (options.cpus or 1) + options.ingresses * INGRESS_CPUS
    with tempfile.TemporaryDirectory(prefix="kvlinker-", ignore_cleanup_errors=True) as folder:
        try:
            ray.init(
                num_cpus=int(cpus) + 1,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                namespace=APPLICATION,
                _temp_dir=str(Path(folder) / "ray"),
            )
        except Exception as error:
            raise FleetError(f"Ray does not start: {error}") from error
        try:
            with _log_pipe(Path(folder) / "log") as pipe:
                yield options.model_copy(update={"log_pipe": str(pipe)})
        finally:
            ray.shutdown()


@contextmanager
def connect_ray(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at ``host:port`` for as long as the block runs."""
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, namespace=APPLICATION)
    except Exception as error:
        raise FleetError(
            f"There is no Ray cluster at {address}, or this machine is not part of it, or it has a"
            f" token, for which RAY_AUTH_MODE=token must be set: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def deploy(options: FleetOptions) -> None:
    """Start the fleet, or change the one that runs, and wait until it serves. Raises FleetError."""
    quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
    try:
        serve.start(proxy_location=ProxyLocation.Disabled, logging_config=quiet)
        serve.run(
            build(options.model_dump()),
            name=APPLICATION,
            route_prefix=None,
            logging_config=quiet,
        )
    except RuntimeError as error:
        raise FleetError(f"The fleet does not start: {_reason() or error}") from error


def remove(seconds: float, *, at_once: Callable[[], bool]) -> None:
    """End the fleet: requests under way may finish within ``seconds``, unless ``at_once`` comes to
    be true."""
    serve.delete(APPLICATION, _blocking=False)
    deadline = time.monotonic() + seconds + 2 * LAST_SECONDS
    while (
        APPLICATION in serve.status().applications and time.monotonic() < deadline and not at_once()
    ):
        time.sleep(_POLL_SECONDS)


def _reason() -> str:
    """Return Ray Serve's messages about processes that do not start: our own errors without the way
    that they took."""
    application = serve.status().applications.get(APPLICATION)
    deployments = application.deployments.values() if application else ()
    return "\n".join(
        _OWN_ERROR.split(each.message)[-1].strip() for each in deployments if each.message
    )


@contextmanager
def _log_pipe(path: Path) -> Iterator[Path]:
    """Make a pipe whose lines come out on stderr."""
    os.mkfifo(path, 0o600)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    held = os.open(path, os.O_WRONLY)  # or it would end with the first writer
    os.set_blocking(reading, True)
    copying = Thread(target=_copy, args=(reading,), name="kvlinker-fleet-log", daemon=True)
    copying.start()
    try:
        yield path
    finally:
        os.close(held)
        copying.join(LAST_LINES_SECONDS)


def _copy(reading: int) -> None:
    while some := os.read(reading, 1 << 16):
        os.write(2, some)
    os.close(reading)
