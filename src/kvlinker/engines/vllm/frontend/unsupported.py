"""The options of requests that only the embedded engine supports."""

from __future__ import annotations

from kvlinker.base.errors import InvalidRequestError, WayOut
from kvlinker.engines.contract.contract import GenerationRequest


def refuse_unsupported(request: GenerationRequest) -> None:
    """Raise InvalidRequestError for the first field that vLLM cannot follow."""
    if request.explains:
        raise InvalidRequestError(
            "The vllm engine does not explain a prompt with its answer: leave out"
            f" 'link.explain'. {WayOut.EXPLAIN}",
            param="link.explain",
        )
    if request.keeps_answer:
        raise InvalidRequestError(
            "The vllm engine keeps no answers, whose KV stays in vLLM: leave out 'link.keep',"
            " and mark the answer where another prompt has it.",
            param="link.keep",
        )
    if request.sampling.prompt_logprobs is not None:
        raise unscored("prompt_logprobs")
    if request.sampling.max_tokens == 0:
        raise InvalidRequestError(
            "max_tokens is 0, but the vllm engine generates at least 1 token.",
            param="max_tokens",
        )


def unscored(param: str) -> InvalidRequestError:
    """Return the error of requests for log probabilities of prompts."""
    return InvalidRequestError(
        "The vllm engine cannot score prompts: vLLM gives log probabilities of prompts only if"
        " nothing is linked. Use the embedded engine.",
        param=param,
    )
