"""Fields of chat requests that ask for more or less reasoning, or for shorter answers, and what
becomes of them.

They are wishes: clients send them along whatever the model is. What has no effect is told in the
answer's headers.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import Field

from kvlinker.base.errors import InvalidRequestError
from kvlinker.doors.http.fields.bodies import RequestBody
from kvlinker.doors.http.fields.decoding import DecodingBody
from kvlinker.llm import LLM

SWITCH_VARIABLE = "enable_thinking"
"""The variable by which chat templates turn reasoning on and off, of models that can do without."""

EFFORT_VARIABLE = "reasoning_effort"
"""The variable by which chat templates ask for more or less reasoning."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]

_Summary = Literal["auto", "concise", "detailed"]


class ReasoningBody(RequestBody):
    """How much the model is to reason. Any ``effort`` but ``none`` turns reasoning on, where the
    chat template can; ``max_tokens`` cannot be kept, so that it is refused for a model that
    reasons. There are no summaries."""

    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    summary: _Summary | None = None
    generate_summary: _Summary | None = None


class ReasoningEffect(NamedTuple):
    """What the fields of a request do with one model."""

    variables: dict[str, Any]
    """The variables that they set in the chat template."""

    ignored: tuple[str, ...]
    """The paths of those that have no effect."""


class ReasoningFields(DecodingBody):
    """Adds to ``DecodingBody`` how much the model is to reason and to say. What has no effect is
    told in a header."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningBody | None = None
    verbosity: Verbosity | None = None

    def reasoning_effect(self, llm: LLM) -> ReasoningEffect:
        """Return what the fields do with this model. Of two efforts, that in ``reasoning`` counts.

        Raises InvalidRequestError for a limit of reasoning that the model may exceed.
        """
        asked = self.reasoning or ReasoningBody()
        reasons = llm.answer_form.reasoning is not None
        if asked.max_tokens is not None and reasons:
            raise InvalidRequestError(
                f"The model reasons, and cannot be held to {asked.max_tokens} tokens of it. Leave"
                " the limit out, or limit the whole answer.",
                param="reasoning.max_tokens",
            )
        given = {"reasoning.effort": asked.effort, "reasoning_effort": self.reasoning_effort}
        efforts = {path: effort for path, effort in given.items() if effort is not None}
        effort = next(iter(efforts.values()), None)
        values = {SWITCH_VARIABLE: effort != "none", EFFORT_VARIABLE: effort}
        variables = {
            name: value
            for name, value in values.items()
            if effort and llm.builder.has_variable(name)
        }
        is_met = bool(variables) or (effort == "none" and not reasons)
        ignored = [path for path, wanted in efforts.items() if wanted != effort or not is_met]
        beside = ("max_tokens", "summary", "generate_summary")
        ignored += [f"reasoning.{name}" for name in beside if getattr(asked, name) is not None]
        if self.verbosity not in (None, "medium"):
            ignored.append("verbosity")
        return ReasoningEffect(variables, tuple(ignored))
