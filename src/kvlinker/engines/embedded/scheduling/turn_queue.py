"""Holds waiting requests in the order of their turns."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import overload

from kvlinker.engines.embedded.requests.request import Request


class TurnQueue(Sequence[Request]):
    """Requests in their order, also after turns have changed: they are sorted anew only once
    somebody looks, however often turns change before."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._sorted = True

    def add(self, request: Request) -> None:
        """Put the request in its place."""
        if self._sorted:
            insort(self._requests, request, key=order_of)
        else:
            self._requests.append(request)

    def remove(self, request: Request) -> None:
        """Take the request out. Raises ValueError where it is not here."""
        first = bisect_left(self._requests, order_of(request), key=order_of) if self._sorted else 0
        del self._requests[self._requests.index(request, first)]

    def disorder(self) -> None:
        """Note that turns of requests that are here may have changed."""
        self._sorted = False

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: object) -> bool:
        return request in self._requests

    def __iter__(self) -> Iterator[Request]:
        return iter(self._in_order())

    @overload
    def __getitem__(self, index: int) -> Request: ...

    @overload
    def __getitem__(self, index: slice) -> list[Request]: ...

    def __getitem__(self, index: int | slice) -> Request | list[Request]:
        return self._in_order()[index]

    def _in_order(self) -> list[Request]:
        if not self._sorted:
            self._requests.sort(key=order_of)
            self._sorted = True
        return self._requests


def order_of(request: Request) -> tuple[float, ...]:
    """Return the request's place among waiting ones of its kind, as a key to sort by."""
    return request.order
