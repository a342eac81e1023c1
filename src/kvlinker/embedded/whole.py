"""Scores whole token sequences in the background: the exact reference that linked answers are compared with."""

from __future__ import annotations

from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.embedded.requests import Ending, Kind, Request
from kvlinker.embedded.scoring import Head, LogprobCollector
from kvlinker.embedded.sequence import TokenSequence
from kvlinker.errors import EngineClosedError, KVLinkerError
from kvlinker.types.answers import PromptLogprobs, Usage


class WholeScoring(Request):
    """Asks for the log probabilities of given tokens, all of which are computed while nobody else needs the engine."""

    kind = Kind.BACKGROUND

    def __init__(self, tokens: NDArray[np.int64], head: Head, *, first: int, top: int, tenant: str) -> None:
        """Score ``tokens`` [length] from position ``first`` on, with ``top`` alternatives each."""
        super().__init__()
        self.tenant = tenant
        self.future: Future[PromptLogprobs] = Future()
        self.future.set_running_or_notify_cancel()
        self._usage = Usage(0, 0, len(tokens))
        self._collector = LogprobCollector(tokens, head, first=first, top=top)
        self.sequence = TokenSequence(tokens, [(0, len(tokens))], most_tokens=len(tokens), logprobs=self._collector)

    def advance(self, logits: Tensor | None) -> Ending:
        return partial(self.future.set_result, self._collector.result(self._usage))

    def cancel(self) -> None:
        self.fail(EngineClosedError("The request was cancelled."))

    def fail(self, error: KVLinkerError) -> None:
        self.future.set_exception(error)
