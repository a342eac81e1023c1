"""A request that wants to know how likely its prompt's last tokens are."""

from __future__ import annotations

from torch import Tensor

from kvlinker.embedded.future_request import FutureRequest
from kvlinker.embedded.logprobs import Head, LogprobCollector
from kvlinker.engine.contract import GenerationRequest
from kvlinker.prompt.segments import Prompt
from kvlinker.types.answers import PromptLogprobs


class Scoring(FutureRequest[PromptLogprobs]):
    """Ends with the log probabilities of the tokens behind the last chunk; generates nothing."""

    def __init__(self, request: GenerationRequest, *, head: Head, vocabulary: int) -> None:
        super().__init__(request, max_tokens=0)
        self._head = head
        self._top = min(request.sampling.logprobs or 0, vocabulary)

    def collector(self, prompt: Prompt) -> LogprobCollector:
        return LogprobCollector(prompt, self._head, top=self._top)

    def accept(self, logits: Tensor) -> None:
        assert self.sequence is not None
        collected = self.sequence.logprobs
        assert collected is not None
        self.finish(
            PromptLogprobs(
                collected.token_ids,
                collected.logprobs,
                collected.top_ids,
                collected.top_logprobs,
                self.usage(),
            )
        )
