"""A request whose prompts are read, and how answers to it may use tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.grammars import check_grammar
from kvlinker.base.types.sampling import SamplingParams
from kvlinker.base.types.tools import Tool, function_of, shown_tool
from kvlinker.prompting.answer_forms.form import AnswerForm
from kvlinker.prompting.answer_forms.reader import PlainReader, Reader
from kvlinker.prompting.segments import Prompt
from kvlinker.service.agents.workflows import WorkflowStep
from kvlinker.service.content import ToolChoice
from kvlinker.service.context_caches.kept_answers import KeepRequest
from kvlinker.service.reading import ReadPrompt


class PreparedRequest(NamedTuple):
    """A request whose prompts are read, ready for ``LLM.submit_prepared``."""

    prompts: Mapping[str, ReadPrompt]
    """By the request's fields that they come from, which errors name."""

    sampling: SamplingParams
    tenant: str

    explains: bool = False
    """True if the first choice of each prompt is to explain how it was linked."""

    shows_attention: bool = False
    """True if the explanation is to have the question's attention."""

    keep: KeepRequest | None = None
    """The part of the very first choice that is to be kept."""

    step: WorkflowStep | None = None

    calls: Callable[[], Reader] | None = None
    """Makes readers of the calls that answers may have; None if no tools are offered."""


class RequestTools:
    """Holds the tools of one request, and how its answers may use them."""

    def __init__(
        self,
        form: AnswerForm,
        tail_of: Callable[[Prompt], str],
        tools: Sequence[Tool] = (),
        choice: ToolChoice | None = None,
        *,
        several: bool = True,
        has_form: bool = False,
        most_calls: int | None = None,
    ) -> None:
        """``form`` is the model's. ``tail_of`` decodes the end of a prompt. ``choice`` None is
        "auto". ``several``: an answer may have more than one call, up to ``most_calls``.
        ``has_form``: the request asks for answers of a form of its own, in which only the model's
        marks begin a call. Raises InvalidRequestError for a choice of tools that are not
        offered."""
        self._form = form.without_bare_calls() if has_form else form
        self._tail_of = tail_of
        self._several = several
        self._most_calls = most_calls if several else 1
        self._choice, self._named = ("auto", None) if choice is None else _parse_choice(choice)
        self._offered = () if self._choice == "none" else tuple(tools)
        self.tools = tuple(map(shown_tool, self._offered))
        """The definitions that the prompt shows, with their marks; none where no tool may be
        called."""

        self._is_text = not self._offered and form.reasoning is None
        names = [function_of(tool)["name"] for tool in tools] if tools else []
        if len(set(names)) < len(names):
            raise InvalidRequestError("'tools' has two functions of the same name.", param="tools")
        if choice is not None and self._choice != "none" and not names:
            raise InvalidRequestError(
                f"'tool_choice' is {choice!r}, but there are no 'tools'.", param="tool_choice"
            )
        if self._named is not None and self._named not in names:
            raise InvalidRequestError(
                f"'tool_choice' names {self._named!r}, which is not among the 'tools'.",
                param="tool_choice",
            )

    @property
    def enforces_calls(self) -> bool:
        """True if answers have to call tools: apart from reasoning, they have no text."""
        return bool(self._offered) and self._choice != "auto"

    def reader(self, prompt: Prompt) -> Reader:
        """Return a reader for one answer to ``prompt``."""
        if self._is_text:
            return PlainReader()
        return self._form.reader(
            self._tail_of(prompt),
            self.tools,
            only_calls=self.enforces_calls,
            most_calls=self._most_calls,
        )

    def sampling_fields(self, prompt: Prompt, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``options``, which are fields of ``SamplingParams``, with those that make answers
        to ``prompt`` call tools as the request demands. Raises InvalidRequestError if ``grammar``
        is none."""
        fields = dict(options)
        check_grammar(fields.get("grammar"))
        if self._is_text:
            return fields
        form, tail, several = self._form, self._tail_of(prompt), self._several
        fields["shown_tokens"] = form.shown_tokens
        if self.enforces_calls:
            named = self._named
            called = [tool for tool in self._offered if named in (None, function_of(tool)["name"])]
            fields["grammar"] = form.calls_grammar(
                called, tail=tail, several=several and named is None
            )
            fields["stop"] = fields["stop_token_ids"] = ()  # which end text, and there is none
            return fields
        fields["call_marks"] = form.call_marks(self._offered)
        if grammar := fields.get("grammar"):
            fields["grammar"] = form.framed(
                grammar, tail=tail, tools=self._offered, several=several
            )
        elif self._offered:
            fields["grammar"] = form.free_grammar(self._offered, tail=tail, several=several)
        elif limited := form.reasoning_grammar(tail):
            fields["grammar"] = limited
        return fields


def _parse_choice(choice: Any) -> tuple[str, str | None]:
    """Return the word of a choice of tools, "named" where it names one, and that name."""
    match choice:
        case "none" | "auto" | "required":
            return choice, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "named", name
    raise InvalidRequestError(
        f"'tool_choice' is {choice!r}, but must be 'none', 'auto', 'required', or a tool, such as "
        "{'type': 'function', 'function': {'name': 'get_weather'}}.",
        param="tool_choice",
    )
