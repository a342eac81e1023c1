"""Fields of chat requests for more or less reasoning, or for shorter answers, and their effects.

They are wishes: clients send them to any model. Fields without effect are named in the answer's
headers.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import Discriminator, Field, Tag

from kvlinker.doors.http.fields.bodies import OR_LEFT_OUT, JsonObject, RequestBody
from kvlinker.llm import LLM

SWITCH_VARIABLE = "enable_thinking"
"""The variable by which chat templates turn reasoning on and off, of models that can do without."""

EFFORT_VARIABLE = "reasoning_effort"
"""The variable by which chat templates ask for more or less reasoning."""

Effort = Annotated[Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], OR_LEFT_OUT]
Verbosity = Annotated[Literal["low", "medium", "high"], OR_LEFT_OUT]

_Summary = Annotated[Literal["auto", "concise", "detailed"], OR_LEFT_OUT]
_Display = Annotated[Literal["summarized", "omitted"], OR_LEFT_OUT]
"""There are no summaries: reasoning is sent as it is, or left out."""

T = TypeVar("T")


class ReasoningBody(RequestBody):
    """How much the model is to reason. Any ``effort`` but ``none``, and a limit, turn reasoning on,
    where the chat template can. ``max_tokens`` ends it. There are no summaries."""

    effort: Effort | None = None
    max_tokens: int | None = Field(default=None, ge=0, le=2**31 - 1)
    summary: _Summary | None = None
    generate_summary: _Summary | None = None


class ThinkingBody(RequestBody):
    """Says whether the model is to reason; ``disabled`` counts for those that can do without."""

    type: Literal["adaptive", "disabled"]
    display: _Display | None = None


class ThinkingBudget(RequestBody):
    """Asks for reasoning of at most ``budget_tokens`` tokens."""

    type: Literal["enabled"]
    budget_tokens: int = Field(ge=1, le=2**31 - 1)
    display: _Display | None = None


_Thinking = Annotated[
    Annotated[ThinkingBody, Tag("<usual>")] | Annotated[ThinkingBudget, Tag("<enabled>")],
    Discriminator(
        lambda value: (
            "<enabled>"
            if isinstance(value, ThinkingBudget)
            or (isinstance(value, dict) and value.get("type") == "enabled")
            else "<usual>"
        )
    ),
]


class ReasoningEffect(NamedTuple):
    """The effect of a request's fields with one model."""

    variables: dict[str, Any]
    """The variables that they set in the chat template."""

    limit: int | None
    """The most tokens of reasoning; None for any number."""

    ignored: tuple[str, ...]
    """The paths of those that have no effect."""


class ReasoningFields(RequestBody):
    """Fields of all conversations for how much the model reasons and writes. Fields without effect
    are named in a header."""

    reasoning_effort: Effort | None = None
    reasoning: ReasoningBody | None = None
    thinking: _Thinking | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, le=2**31 - 1, description="As `reasoning.max_tokens`; -1 is off."
    )
    include_reasoning: bool | None = Field(
        default=None, description="False to leave reasoning out of the answer."
    )
    verbosity: Verbosity | None = None
    chat_template_kwargs: JsonObject | None = Field(
        default=None,
        description="Variables of the model's chat template, such as `enable_thinking`.",
    )

    @property
    def tells_reasoning(self) -> bool:
        """True if the answer is to have the reasoning in it."""
        omitted = self.thinking is not None and self.thinking.display == "omitted"
        return self.include_reasoning is not False and not omitted

    def reasoning_effect(self, llm: LLM) -> ReasoningEffect:
        """Return the effect of the fields with this model. Of two efforts, or limits, that in
        ``reasoning`` counts; the template's own variables count before them."""
        asked = self.reasoning or ReasoningBody()
        form = llm.answer_form
        off = isinstance(self.thinking, ThinkingBody) and self.thinking.type == "disabled"
        wanted: dict[str, str | None] = {
            "reasoning.effort": asked.effort,
            "thinking.type": "none" if off else None,
            "reasoning_effort": self.reasoning_effort,
        }
        efforts = _given(wanted)
        effort = next(iter(efforts.values()), None)
        budget = self.thinking.budget_tokens if isinstance(self.thinking, ThinkingBudget) else None
        limits = _given(
            {
                "reasoning.max_tokens": asked.max_tokens,
                "thinking.budget_tokens": budget,
                "thinking_token_budget": (
                    None if self.thinking_token_budget == -1 else self.thinking_token_budget
                ),
            }
        )
        limit = next(iter(limits.values()), None) if form.can_limit_reasoning else None
        values: dict[str, Any] = {}
        if effort is not None or limits:
            values[SWITCH_VARIABLE] = effort != "none"
        if effort is not None:
            values[EFFORT_VARIABLE] = effort
        own = self.chat_template_kwargs or {}
        variables = {**values, **own}
        variables = {
            name: value
            for name, value in variables.items()
            if llm.builder.template.has_variable(name)
        }
        is_met = bool(values.keys() & variables.keys()) or (
            effort == "none" and form.reasoning is None
        )
        ignored = [path for path, each in efforts.items() if each != effort or not is_met]
        ignored += [path for path, each in limits.items() if each != limit]
        beside = ("summary", "generate_summary")
        ignored += [f"reasoning.{name}" for name in beside if getattr(asked, name) is not None]
        ignored += [f"chat_template_kwargs.{name}" for name in own if name not in variables]
        if self.verbosity not in (None, "medium"):
            ignored.append("verbosity")
        return ReasoningEffect(variables, limit, tuple(ignored))


def _given(values: dict[str, T | None]) -> dict[str, T]:
    """Return the values that are not None."""
    return {path: value for path, value in values.items() if value is not None}
