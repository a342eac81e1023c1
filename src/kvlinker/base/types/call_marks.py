"""Texts with which calls of tools begin in an answer: stop strings count before them alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The marks by which calls begin in an answer's text."""

    texts: tuple[str, ...]

    anywhere: bool
    """False if calls are all of an answer: then it begins with one of ``texts``."""

    def free_part(self, text: str, *, is_start: bool) -> tuple[int, bool]:
        """Return the length of the text before calls in ``text``, which begins outside a call, and
        whether one begins after it.

        Without one, the rest may be the beginning of a mark. ``is_start``: ``text`` is the answer's
        beginning.
        """
        if not self.anywhere:
            if is_start and any(text.startswith(mark) for mark in self.texts):
                return 0, True
            open_yet = is_start and any(mark.startswith(text) for mark in self.texts)
            return 0 if open_yet else len(text), False
        found = [index for mark in self.texts if (index := text.find(mark)) >= 0]
        if found:
            return min(found), True
        return len(text) - max(overlap(text, mark) for mark in self.texts), False


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of ``text`` that is a beginning of ``mark``, but not all
    of it."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
