"""The form in which one model writes calls: the texts around their names and arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class CallForm:
    """The texts of calls, from the folder's files. A call is its *head*, with the name, its
    arguments, a JSON object, and its *tail*."""

    trigger: str | None
    opening: str
    call: str
    between: str | None
    closing: str

    @classmethod
    def of(cls, calls: Mapping[str, str | None]) -> Self:
        """Take the field ``calls`` of a file."""
        return cls(
            calls["trigger"],
            calls.get("open") or "",
            calls["call"] or "",
            calls["between"],
            calls.get("close") or "",
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

    @property
    def _before_arguments(self) -> str:
        return self.call.partition("{arguments}")[0]

    def _head(self, name: str) -> str:
        return self._before_arguments.replace("{name}", json.dumps(name)[1:-1])
