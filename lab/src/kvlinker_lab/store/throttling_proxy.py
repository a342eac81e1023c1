"""A TCP proxy that holds what a server sends to a given bandwidth: a medium as slow as a benchmark
wants it."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from urllib.parse import urlsplit

from kvlinker.base.errors import InvalidRequestError

PIECE_BYTES = 1 << 17
"""The most bytes that are passed on at once."""

BURST_SECONDS = 0.002
"""The most seconds of idle time that the medium may make up for afterwards."""


class ThrottlingProxy:
    """A proxy that runs in a process of its own, so that it takes no turns from the measured one's
    threads."""

    def __init__(self, port: int, bandwidth: Synchronized[float]) -> None:
        self.port = port
        self._bandwidth = bandwidth

    @property
    def bandwidth(self) -> float:
        """The bytes per second that all connections get together; may be set at any time."""
        return self._bandwidth.value

    @bandwidth.setter
    def bandwidth(self, value: float) -> None:
        self._bandwidth.value = value

    def url(self, target: str) -> str:
        """Return the target's URL, by way of the proxy."""
        parts = urlsplit(target)
        userinfo, at, _ = parts.netloc.rpartition("@")
        return parts._replace(netloc=f"{userinfo}{at}127.0.0.1:{self.port}").geturl()


@contextmanager
def throttling_proxy(target: str) -> Iterator[ThrottlingProxy]:
    """Run a proxy before the server of a redis:// URL, at first without a limit. Raises
    InvalidRequestError for other URLs."""
    parts = urlsplit(target)
    if parts.scheme != "redis":
        raise InvalidRequestError(
            f"A proxy cannot stand before {parts.scheme}://: give a URL that begins with redis://.",
            param="redis_url",
        )
    context = multiprocessing.get_context("spawn")
    bandwidth = context.Value("d", float("inf"))
    ours, theirs = context.Pipe()
    address = (parts.hostname or "127.0.0.1", parts.port or 6379)
    process = context.Process(target=_run, args=(address, bandwidth, theirs), daemon=True)
    process.start()
    try:
        yield ThrottlingProxy(ours.recv(), bandwidth)
    finally:
        process.terminate()
        process.join()


def _run(address: tuple[str, int], bandwidth: Synchronized[float], ready: Connection) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(address, bandwidth, ready))


async def _serve(
    address: tuple[str, int], bandwidth: Synchronized[float], ready: Connection
) -> None:
    loop = asyncio.get_running_loop()
    medium = _Medium(bandwidth)
    carrying = set()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        ready.send(listener.getsockname()[1])
        while True:
            client, _ = await loop.sock_accept(listener)
            try:
                server = socket.create_connection(address)
            except OSError:
                client.close()
                continue
            for end in (client, server):
                end.setblocking(False)
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            carrying.add(asyncio.create_task(_carry(client, server, None)))
            carrying.add(asyncio.create_task(_carry(server, client, medium)))


async def _carry(source: socket.socket, sink: socket.socket, medium: _Medium | None) -> None:
    loop = asyncio.get_running_loop()
    piece = memoryview(bytearray(PIECE_BYTES))
    with suppress(OSError):
        while count := await loop.sock_recv_into(source, piece):
            if medium is not None:
                await medium.carry(count)
            await loop.sock_sendall(sink, piece[:count])
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


class _Medium:
    """Says when bytes have passed, one after the other, whichever connection they are of."""

    def __init__(self, bandwidth: Synchronized[float]) -> None:
        self._bandwidth = bandwidth
        self._free_at = 0.0

    async def carry(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - BURST_SECONDS) + nbytes / self._bandwidth.value
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)
