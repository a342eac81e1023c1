"""Gives the log probabilities of tokens: after linked chunks, or of whole sequences in the
background."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvlinker.base.types.answers import PromptLogprobs, Usage
from kvlinker.engines.embedded.decoding.logprobs import Head, LogprobCollector
from kvlinker.engines.embedded.requests.prompt_request import PromptFuture
from kvlinker.engines.embedded.requests.request import Ending, FutureRequest, ResultKind
from kvlinker.engines.embedded.requests.sequence import TokenSequence


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
