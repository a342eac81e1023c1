"""Requests for one result of a prompt, without an answer: how it is linked, or the log
probabilities of its tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.errors import KVLinkerError
from kvlinker.base.types.answers import PromptLogprobs, Usage
from kvlinker.engines.contract.contract import GenerationRequest
from kvlinker.engines.embedded.decoding.logprobs import Head, LogprobCollector
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.engines.embedded.requests.generation import PromptRequest
from kvlinker.engines.embedded.requests.request import Ending, FutureRequest, Request, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence
from kvlinker.linking.explanation import Explanation

T = TypeVar("T")


class PromptFuture(PromptRequest, FutureRequest[T]):
    """A request for a prompt whose value is ready when a generation would sample its first
    token."""

    def fail(self, error: KVLinkerError) -> None:
        self._forget()
        super().fail(error)

    def _accept(self, logits: Tensor) -> Ending:
        return partial(self._finish, self._value())

    def _finish(self, value: T) -> None:
        self._forget()
        self.future.set_result(value)

    @abstractmethod
    def _value(self) -> T:
        """Return the request's result, now that its prompt is computed."""


class _EndedByCancelling(Future[T]):
    """A future that callers cannot cancel under the engine's hands, but whose request the engine
    ends then: the future has its error."""

    def __init__(self, end: Callable[[], None]) -> None:
        super().__init__()
        self._end = end

    def cancel(self) -> bool:
        self._end()
        return False


class Explaining(PromptFuture[Explanation]):
    """Asks how a prompt is linked. It does not count as a use of its chunks."""

    explains = True

    def __init__(
        self,
        request: GenerationRequest,
        loaded: LoadedModel,
        *,
        cancel: Callable[[Sequence[Request]], None],
    ) -> None:
        """``cancel`` has the engine end requests."""
        super().__init__(request, loaded)
        self.future = _EndedByCancelling(partial(cancel, (self,)))
        self.future.set_running_or_notify_cancel()

    def _value(self) -> Explanation:
        return self._explanation()


class Scoring(PromptFuture[PromptLogprobs]):
    """Asks for the log probabilities of the tokens after the last chunk; generates nothing."""

    def _value(self) -> PromptLogprobs:
        assert self._scored is not None
        return self._scored.result(self._usage())


class WholeScoring(FutureRequest[PromptLogprobs]):
    """Computes the log probabilities of given tokens, all in full, while there are no other
    requests."""

    kind = ResultKind.BACKGROUND

    def __init__(
        self, tokens: NDArray[np.int64], head: Head, *, first: int, top: int, tenant: str
    ) -> None:
        """Score ``tokens`` [length] from position ``first`` on, with ``top`` alternatives each."""
        super().__init__()
        self.tenant = tenant
        self._usage = Usage(0, 0, len(tokens))
        self._collector = LogprobCollector(tokens, head, first=first, top=top)
        self.sequence = TokenSequence(
            tokens, [(0, len(tokens))], most_tokens=len(tokens), logprobs=self._collector
        )

    def advance(self, logits: Tensor | None) -> Ending:
        return partial(self.future.set_result, self._collector.result(self._usage))
