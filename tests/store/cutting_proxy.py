"""A TCP proxy that cuts connections: after so many bytes from the server, or where the client sends
some text; or holds back everything, as a network does that is parted."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class CuttingProxy:
    """Listens on ``port``. ``limit``: bytes from the server per connection, None for all.
    ``before``: what the client sends up to these bytes is the last that the server sees of it, as
    if it had been killed. While ``passing`` is not set, nothing passes, and nobody is told."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.limit: int | None = None
        self.before: bytes | None = None
        self.passing = threading.Event()
        self.passing.set()
        self.cuts = 0
        self.ports: set[int] = set()  # which the server sees its clients come from
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else ``accept`` takes one more connection
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self.ports.add(server.getsockname()[1])
                threading.Thread(
                    target=self._carry, args=(client, server, False), daemon=True
                ).start()
                threading.Thread(
                    target=self._carry, args=(server, client, True), daemon=True
                ).start()

    def _carry(self, source: socket.socket, sink: socket.socket, limited: bool) -> None:
        carried = 0
        rest = b""  # of what was carried, for the text may come in two parts
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.passing.wait()
                carried += len(data)
                if limited and self.limit is not None and carried > self.limit:
                    self.cuts += 1
                    sink.sendall(data[: len(data) // 2])
                    break
                if not limited and self.before is not None and self.before in rest + data:
                    self.cuts += 1
                    self.close()
                    sink.sendall(data[: max(0, (rest + data).index(self.before) - len(rest))])
                    break
                sink.sendall(data)
                rest = (rest + data)[-16:]
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
