"""Sampling parameters say how a request wants its tokens chosen."""

from __future__ import annotations

from dataclasses import dataclass

from kvlinker.errors import InvalidRequestError

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, 1000),
}
_WHOLE = ("top_k", "max_tokens", "logprobs")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Says how tokens are chosen and when to stop; the names and defaults are OpenAI's and vLLM's.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``min_p`` 0 are off. ``logprobs`` None gives none, k gives the
    sampled token's and the k best alternatives'. ``max_tokens`` None means up to the context window.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequestError, naming the parameter, for those out of range."""
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in ("max_tokens", "logprobs"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise InvalidRequestError(f"{name} is {value!r}, but must be from {low} to {high}.", param=name)
            if name in _WHOLE and not isinstance(value, int):
                raise InvalidRequestError(f"{name} is {value!r}, but must be a whole number.", param=name)
            if name not in _WHOLE:
                object.__setattr__(self, name, float(value))
        if not all(isinstance(text, str) and text for text in self.stop):
            raise InvalidRequestError(f"stop is {self.stop!r}, but must be texts that are not empty.", param="stop")
