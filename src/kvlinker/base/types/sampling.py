"""Sampling parameters say how a request wants its tokens chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TypedDict

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.call_marks import CallMarks
from kvlinker.base.types.grammars import AnswerGrammar, check_grammar

_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "max_tokens": (0, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 1000),
    "prompt_logprobs": (0, 1000),
}
"""The lowest and the highest value of each number: OpenAI's and vLLM's ranges, and bounds chosen by
hand where these have none."""

_WHOLE = ("top_k", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_OPTIONAL = ("max_tokens", "logprobs", "prompt_logprobs", "allowed_token_ids")

COLDEST = 1e-5
"""The lowest temperature that is not greedy; vLLM's bound. Dividing logits by less would
overflow."""

TOKEN_IDS = 2**31
"""Token ids must be below this; no vocabulary is that large."""

MOST_BIAS = 100
"""The largest number that ``logit_bias`` adds to a logit, or takes from it; OpenAI's bound."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Says how tokens are chosen and when to stop; the names and defaults are OpenAI's and vLLM's.

    ``temperature`` 0 is greedy, and so is one below ``COLDEST``. ``top_k`` 0 and ``min_p`` 0 are
    off. ``logprobs`` None gives none, k gives the sampled token's and the k best alternatives';
    ``prompt_logprobs`` does so for the tokens after the prompt's last context cache. ``max_tokens``
    None means up to the context window. Before ``min_tokens``, only a full window ends the answer.
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
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """The tokens that end the answer, in addition to the model's own; they are not part of its
    text."""

    bad_words: tuple[str, ...] = ()
    """The texts that the answer must not contain, as they are encoded, with or without a space
    before them."""

    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be generated; None for all."""

    skip_special_tokens: bool = True
    """False to show special tokens in the text."""

    include_stop_str_in_output: bool = False
    """True to include the end of the answer in its text: the stop string, or the token."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    """The numbers, from -100 to 100, that are added to the logits of these tokens."""

    prompt_logprobs: int | None = None
    shown_tokens: frozenset[int] = frozenset()
    """The special tokens that the answer's text shows; all others are left out."""

    call_marks: CallMarks | None = None
    """Where calls of tools begin in the answer; from there on, neither ``stop`` nor
    ``stop_token_ids`` count."""

    grammar: AnswerGrammar | None = None
    """The grammar that the answer follows, which then also decides where it may end."""

    @property
    def greedy(self) -> bool:
        """True if no token is drawn: each is the likeliest of the allowed ones."""
        return self.temperature < COLDEST

    @property
    def takes_the_most_likely(self) -> bool:
        """True if each token is the one that the model finds the most likely, with nothing changed
        or forbidden."""
        penalised = self.repetition_penalty != 1 or bool(
            self.presence_penalty or self.frequency_penalty
        )
        forbids = self.grammar is not None or bool(self.bad_words or self.min_tokens)
        forbids = forbids or self.allowed_token_ids is not None
        return self.greedy and not (penalised or forbids or self.logit_bias)

    def __post_init__(self) -> None:
        """Check the values. Raises InvalidRequestError, naming the parameter, for those out of
        range."""
        self._check_types()
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not low <= value <= high
            ):
                raise InvalidRequestError(
                    f"{name} is {value!r}, but must be from {low} to {high}.", param=name
                )
            if name not in _WHOLE:
                object.__setattr__(self, name, float(value))
            elif not isinstance(value, int):
                raise InvalidRequestError(
                    f"{name} is {value!r}, but must be a whole number.", param=name
                )
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            for text in texts:
                if not isinstance(text, str) or not text:
                    raise InvalidRequestError(
                        f"{name} is {texts!r}, but must be texts that are not empty.", param=name
                    )
        if self.allowed_token_ids == ():
            raise InvalidRequestError(
                "allowed_token_ids is empty: no token could be generated. Omit it to allow all"
                " tokens.",
                param="allowed_token_ids",
            )
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            for token in getattr(self, name) or ():
                if type(token) is not int or not 0 <= token < TOKEN_IDS:
                    raise InvalidRequestError(
                        f"{token!r} in {name} is no token id, a whole number from 0 to"
                        f" {TOKEN_IDS - 1}.",
                        param=name,
                    )
        for token, bias in self.logit_bias.items():
            if not isinstance(bias, int | float) or not -MOST_BIAS <= bias <= MOST_BIAS:
                raise InvalidRequestError(
                    f"The logit_bias of token {token} is {bias!r}, but must be from {-MOST_BIAS} to"
                    f" {MOST_BIAS}.",
                    param="logit_bias",
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )

    def _check_types(self) -> None:
        """Check the values that are not numbers, and keep them as immutable values."""
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if not isinstance(value, Iterable):
                raise InvalidRequestError(
                    f"{name} is {value!r}, but must be a list; leave it out for none.", param=name
                )
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError(
                f"logit_bias is {self.logit_bias!r}, but must be a mapping from token ids to"
                " numbers.",
                param="logit_bias",
            )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        if not isinstance(self.seed, Integral | None):
            raise InvalidRequestError(
                f"seed is {self.seed!r}, but must be a whole number.", param="seed"
            )
        if self.grammar is not None:
            check_grammar(self.grammar)


class SamplingFields(TypedDict, total=False):
    """Sampling parameters as keyword arguments, with the types in which each may be given; omitted
    fields have the defaults of ``SamplingParams``."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    max_tokens: int | None
    logprobs: int | None
    ignore_eos: bool
    min_tokens: int
    stop_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    allowed_token_ids: Sequence[int] | None
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    logit_bias: Mapping[int, float]
    prompt_logprobs: int | None
    shown_tokens: frozenset[int]
    call_marks: CallMarks | None
    grammar: AnswerGrammar | None
