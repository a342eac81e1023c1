"""Requests that come to one value."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Generic, TypeVar

from kvlinker.embedded.linked_request import LinkedRequest
from kvlinker.engine.contract import GenerationRequest
from kvlinker.errors import EngineClosedError, KVLinkerError

T = TypeVar("T")


class FutureRequest(LinkedRequest, Generic[T]):
    """Links like a generation, and ends where that would sample its first token, with a value in its place."""

    def __init__(self, request: GenerationRequest, *, max_tokens: int) -> None:
        super().__init__(request, max_tokens=max_tokens)
        self.future: Future[T] = Future()

    def finish(self, value: T) -> None:
        self.ended = True
        self.future.set_result(value)

    def cancel(self) -> None:
        self.fail(EngineClosedError("The request was cancelled."))

    def fail(self, error: KVLinkerError) -> None:
        if not self.ended:
            self.ended = True
            self.future.set_exception(error)
