"""The address that a server binds to; the CLI takes it before the model is loaded."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import ip_address

from kvlinker.base.errors import InvalidRequestError, KVLinkerError


class AddressError(KVLinkerError):
    """Raised when the address cannot be bound."""

    code = "address_unavailable"


def check_address(host: str, api_keys: Sequence[str]) -> None:
    """Raise InvalidRequestError for an address that others can reach while no key protects it."""
    if not api_keys and not is_loopback(host):
        raise InvalidRequestError(
            f"Without API keys the server binds to loopback only, not to {host!r}. Configure keys "
            "(KVLINKER_API_KEYS=key1,key2), or leave --host out.",
            param="host",
        )


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Bind a socket that does not listen yet: clients are refused until a server does. Sockets that
    are all ``shared`` may have the same address; the system gives each connection to one of those
    that listen. Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as error:
        raise AddressError(
            f"Cannot bind to {host}:{port}: {error.strerror}. Choose another --port or --host."
        ) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Listen on a bound socket. Raises AddressError where another process listens there."""
    try:
        listener.listen()
    except OSError as error:
        raise AddressError(
            f"Cannot listen at {url_of(listener)}: {error.strerror}. Choose another --port or"
            " --host."
        ) from error


def url_of(listener: socket.socket) -> str:
    """Return the URL at which clients reach the socket's server."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's own, which no other machine
    reaches."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
