"""How the answers to one conversation are to be written, and how they are read: tools, reasoning, and forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from kvlinker.errors import InvalidRequestError
from kvlinker.llm import LLM, Prompt, ReadPrompt
from kvlinker.prompt.answer_forms.reader import AnswerReader
from kvlinker.server.answers.answering import Asked
from kvlinker.server.fields.tools import NamedToolBody, ToolBody, shown_tools
from kvlinker.types.sampling import SamplingParams
from kvlinker.types.tools import Tool


class AsksForTools(Protocol):
    """Is a request to answer a conversation, which may offer tools."""

    @property
    def tools(self) -> Sequence[ToolBody] | None: ...

    @property
    def tool_choice(self) -> Literal["none", "auto", "required"] | NamedToolBody | None: ...

    @property
    def parallel_tool_calls(self) -> bool | None: ...

    def sampling_fields(self) -> dict[str, Any]: ...

    def read(self, llm: LLM, tools: Sequence[Tool], *, tenant: str) -> ReadPrompt: ...


class Conversing:
    """The tools of one request, and how its answers may use them."""

    def __init__(self, llm: LLM, body: AsksForTools) -> None:
        """Raises InvalidRequestError for a choice of tools that are not offered."""
        self._llm = llm
        self._body = body
        self._choice = body.tool_choice or "auto"
        self._offered = () if self._choice == "none" else tuple(body.tools or ())
        names = [tool.function.name for tool in body.tools or ()]
        if len(set(names)) < len(names):
            raise InvalidRequestError("'tools' has two functions of the same name.", param="tools")
        if self._choice not in ("none", "auto") and not names:
            raise InvalidRequestError("'tool_choice' asks for a call, but there are no 'tools'.", param="tool_choice")
        if isinstance(self._choice, NamedToolBody) and self._choice.function.name not in names:
            raise InvalidRequestError(
                f"'tool_choice' names {self._choice.function.name!r}, which is not among the 'tools'.",
                param="tool_choice",
            )

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The definitions that the prompt shows; none where no tool may be called."""
        return shown_tools(self._offered)

    def asked(self, *, tenant: str) -> Asked:
        """Return the prompt, which shows the tools, and how to answer it. Raises what ``LLM.read_chat`` and
        ``sampling`` do. It takes long for long conversations: call it in a thread."""
        read = self._body.read(self._llm, self.tools, tenant=tenant)
        return Asked({"messages": read}, self.sampling(read.prompt))

    @property
    def _reads(self) -> bool:
        """True if answers may have more than text."""
        return bool(self._offered) or self._llm.answer_form.reasoning is not None

    def reader(self, prompt: Prompt) -> AnswerReader:
        """Return a reader for one answer to ``prompt``."""
        if not self._reads:
            return AnswerReader()
        return self._llm.answer_form.reader(self._llm.tail_of(prompt), self.tools)

    def sampling(self, prompt: Prompt) -> SamplingParams:
        """Return the sampling parameters, with what makes answers call tools as the request demands.

        Raises InvalidRequestError.
        """
        fields = self._body.sampling_fields()
        if self._reads:
            form, tail = self._llm.answer_form, self._llm.tail_of(prompt)
            fields["shown_tokens"] = form.shown_tokens
            several = self._body.parallel_tool_calls is not False
            if self._offered and self._choice != "auto":
                fields["grammar"] = form.calls_grammar(self._called, tail=tail, several=several and not self._named)
            elif grammar := fields.get("grammar"):
                fields["grammar"] = form.framed(grammar, tail=tail, tools=self._enforced, several=several)
            elif self._offered and (not several or any(tool.function.strict for tool in self._offered)):
                fields["grammar"] = form.free_grammar(self._enforced, tail=tail, several=several)
        return self._llm.sampling_params(**fields)

    @property
    def _named(self) -> str | None:
        return self._choice.function.name if isinstance(self._choice, NamedToolBody) else None

    @property
    def _called(self) -> tuple[Tool, ...]:
        """The definitions of the tools of which one has to be called."""
        named = self._named
        return tuple(tool.tool(enforced=False) for tool in self._offered if named in (None, tool.function.name))

    @property
    def _enforced(self) -> tuple[Tool, ...]:
        """The definitions of the tools that may be called, as far as they are enforced."""
        return tuple(tool.tool(enforced=True) for tool in self._offered)
