"""The form in which one model writes calls: the texts around their names and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

FENCES = ("", "```", "```json")
"""Stand before the JSON object of a call that is written without its marks."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts of calls, from the folder's files. A call is its *head*, with the name, its
    arguments, a JSON object, and its *tail*."""

    trigger: str | None
    opening: str
    call: str
    between: str | None
    closing: str

    bare: str | None
    """The JSON object in a call, which counts as one also without the text around it, in a line of
    its own or in a fence of Markdown; None if it does not."""

    @classmethod
    def of(cls, calls: Mapping[str, str | None], chat_template: str) -> Self:
        """Take the field ``calls`` of a file, for the model of this chat template. Its calls may be
        bare where the template shows the JSON object, or has no tools, so that kvlinker's own
        section does."""
        found = re.search(r'\{"name": "\{name\}", "(\w+)": \{arguments\}\}', calls["call"] or "")
        shown = found and re.search(rf'"{found[1]}\\?":', chat_template)
        return cls(
            calls["trigger"],
            calls.get("open") or "",
            calls["call"] or "",
            calls["between"],
            calls.get("close") or "",
            found[0] if found and (shown or "tools" not in chat_template) else None,
        )

    @property
    def tail(self) -> str:
        """The text after the arguments of a call."""
        return self.call.partition("{arguments}")[2]

    @property
    def calls_begin_alike(self) -> bool:
        """True if every call begins with the trigger, not only the first one."""
        return self.trigger is not None and self.trigger in self.call

    def first_head(self, name: str) -> str:
        """Return the text before the arguments of the first call."""
        return self.opening + self._head(name)

    def next_head(self, name: str) -> str:
        """Return the text between the tail of a call and the arguments of the next one."""
        return (self.between or "") + self._head(name)

    def told_by(self, head: str) -> str:
        """Return the beginning of a ``head`` that identifies the name: up to the character after
        it. Where calls have no trigger, and other JSON may begin alike, it is all of it."""
        behind = self._before_arguments.partition("{name}")[2]
        return head if self.trigger is None else head[: len(head) - len(behind) + 1]

    def bare_heads(self, name: str) -> list[str]:
        """Return the beginnings of bare calls up to the brace of their arguments, without space."""
        if self.bare is None:
            return []
        head = self.bare.partition("{arguments}")[0].replace("{name}", json.dumps(name)[1:-1])
        return [fence + "".join(head.split()) + "{" for fence in FENCES]

    def bare_pattern(self, name: str, *, is_next: bool = False) -> str:
        """Return the regular expression of the beginnings of bare calls before their arguments,
        where ``name`` is one, too. Before the fence of a call that ``is_next``, another one may
        end, so that it has to name JSON."""
        head = (self.bare or "").partition("{arguments}")[0]
        parts = [re.escape(part) for part in re.findall(r'"[^"]*"|[^"\s]', head)]
        fence = r"(```json\s*)?" if is_next else r"(```(json)?\s*)?"
        return fence + r"\s*".join(parts).replace(r"\{name\}", name)

    @property
    def _before_arguments(self) -> str:
        return self.call.partition("{arguments}")[0]

    def _head(self, name: str) -> str:
        return self._before_arguments.replace("{name}", json.dumps(name)[1:-1])
