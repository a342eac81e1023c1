"""Clients of a kvlinker server: the calls of ``LLM`` over HTTP, sync and async. They import no
torch."""

from kvlinker.doors.client.clients import AsyncClient, Client
from kvlinker.doors.client.wire import (
    RemoteAnswer,
    RemoteContextCache,
    RemotePage,
    ServerUnreachableError,
)
from kvlinker.doors.client.workflows import Workflow

__all__ = [
    "AsyncClient",
    "Client",
    "RemoteAnswer",
    "RemoteContextCache",
    "RemotePage",
    "ServerUnreachableError",
    "Workflow",
]
