"""The names of Ray Serve that the fleet uses beyond its stable interface: each once, here, where a
test checks it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import ray.serve._private.replica as serve_replica
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

ANSWER_SECONDS = 5.0
"""The longest wait for replicas to report their addresses."""


def bind_no_port() -> None:
    """Keep Ray Serve from opening a port in this replica: it would listen on all addresses for
    pickled calls of others, which a fleet does not make. Called before it does so."""
    serve_replica.add_port_to_grpc_server = _no_port


def _no_port(server: Any, address: str) -> int:
    return 0


async def ask_all(handle: DeploymentHandle[Any], method: str) -> Iterable[Any]:
    """Return the answers of all replicas of a deployment that answer."""
    try:
        answers = await handle.broadcast(method).results_async(
            timeout_s=ANSWER_SECONDS, return_exceptions=True
        )
    except DeploymentUnavailableError:  # there is none
        return []
    return [each for each in answers if not isinstance(each, BaseException)]
