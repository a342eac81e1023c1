"""The two kinds of processes of a fleet, as Ray Serve runs them: servers, and ingresses before
them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from threading import Thread
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.events import Event, FirstToken
from kvlinker.doors.http.edge.address import bind, check_address
from kvlinker.doors.http.edge.request_spans import provider_from_environment
from kvlinker_fleet.ray_serve.options import FleetOptions, key_of_fleet
from kvlinker_fleet.ray_serve.ray_names import ask_all, bind_no_port
from kvlinker_fleet.ray_serve.scaling import Load
from kvlinker_fleet.ray_serve.serving import BackgroundServer, log_as

_SHARING_PROCESSORS = ("VLLM_CPU_OMP_THREADS_BIND", "nobind")
"""Keeps vLLM from binding its threads to processors: on CPUs, all replicas of a machine would bind
them to the same. It then has as many as Ray sets aside, in OMP_NUM_THREADS."""


POLL_SECONDS = 2.0
"""The seconds between two questions which builders there are."""


class NotServingError(KVLinkerError):
    """Raised where a process does not serve any more, and is to be replaced."""


class _Process:
    """A process that serves until Ray Serve ends it."""

    _server: BackgroundServer | None = None

    def __init__(self, options: FleetOptions) -> None:
        bind_no_port()
        self._log = log_as(options.read_settings(), options.log_pipe)

    def check_health(self) -> None:
        """Raise NotServingError if this process is to be replaced."""
        if self._server is not None and not self._server.serves:
            raise NotServingError("It does not serve any more.")

    def __del__(self) -> None:
        """Finish running requests: Ray Serve calls this when it ends a replica."""
        if self._server is not None:
            self._server.stop()
            self._log.close()


class _Model(_Process):
    """The model, and kvlinker's routes on a port of its own."""

    def __init__(
        self,
        options: FleetOptions,
        builders: Callable[[], Sequence[str]] | None = None,
        **changes: Any,
    ) -> None:
        super().__init__(options)
        os.environ.setdefault(*_SHARING_PROCESSORS)  # before vLLM is imported
        from kvlinker.doors.serving import builder_client, create_server
        from kvlinker.llm import LLM

        host = ray.util.get_node_ip_address()
        settings = options.read_settings(host=host, port=0, cors_origins=(), **changes)
        check_address(host, settings.accepted_keys)
        listener = bind(host, 0)
        llm = LLM.from_settings(settings, builders=builder_client(settings, builders))
        app = create_server(llm, settings, provider_from_environment())
        self._load = Load(lambda: llm.current_load().running + llm.current_load().waiting)
        llm.events.subscribe(self._note)
        self._server = BackgroundServer(
            app,
            settings,
            listener,
            healthy=lambda: llm.healthy,
            drain=app.state.served.drain,
        )

    def url(self) -> str:
        """Return where this server is reached."""
        assert self._server is not None
        return self._server.url

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return this server's load, for ``Scaling``."""
        return self._load.figures()

    def _note(self, event: Event) -> None:
        if isinstance(event, FirstToken):
            self._load.first_token(event.seconds)


class Server(_Model):
    """One server, which asks the fleet's builders where there are some."""

    def __init__(self, options: FleetOptions, builders: DeploymentHandle[Any] | None) -> None:
        if builders is None:
            super().__init__(options)
        else:
            super().__init__(options, FoundReplicas(builders), role="serve")


class Builder(_Model):
    """One server that computes chunks for the others."""

    def __init__(self, options: FleetOptions) -> None:
        super().__init__(options, role="build")


class FoundReplicas:
    """Keeps the recent addresses of a deployment's replicas."""

    def __init__(self, deployment: DeploymentHandle[Any]) -> None:
        self._deployment = deployment
        self._urls: tuple[str, ...] = ()
        Thread(target=self._follow, name="kvlinker-builders", daemon=True).start()

    def __call__(self) -> Sequence[str]:
        return self._urls

    def _follow(self) -> None:
        while True:
            with suppress(Exception):  # whatever finds them: those that are known go on
                self._urls = tuple(asyncio.run(ask_all(self._deployment, "url")))
            time.sleep(POLL_SECONDS)


class Ingress(_Process):
    """One router, at the fleet's address."""

    def __init__(self, options: FleetOptions, deployments: list[DeploymentHandle[Any]]) -> None:
        super().__init__(options)
        from kvlinker_fleet.app import create_router

        async def find() -> Iterable[str]:
            found = await asyncio.gather(*(ask_all(each, "url") for each in deployments))
            return chain.from_iterable(found)

        settings = options.read_settings()
        check_address(settings.host, settings.accepted_keys)
        listener = bind(settings.host, settings.port, shared=True)
        app = create_router(find, settings, api_key=key_of_fleet(settings))
        self._server = BackgroundServer(
            app, settings, listener, healthy=lambda: True, drain=app.state.drain
        )
