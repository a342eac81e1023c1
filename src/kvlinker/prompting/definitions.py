"""Finds the definitions of tools in rendered prompts, so that they are chunks wherever a chat
template puts them.

No template is known by name: how it writes a tool is seen by rendering a prompt with the tool once
and twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from kvlinker.base.types.chunks import Chunk


def repeated_text(once: str, twice: str) -> str | None:
    """Return the text that stands once in ``once`` and twice, one after the other, in ``twice``,
    without the white space around it; None if the two do not differ like that.

    ``once`` is a head, the text and a tail; ``twice`` has a gap and the text again before the tail.
    Where the tail begins as the gap does, several cuts give the same prompts: the leftmost is
    taken.
    """
    added = len(twice) - len(once)
    begin = len(once) - _alike(once[::-1], twice[::-1])
    end = min(_alike(once, twice), begin + added)
    return once[begin:end].strip() or None


def with_definitions(
    parts: Sequence[str | Chunk], definitions: Mapping[str, Chunk]
) -> list[str | Chunk]:
    """Return a prompt's parts with chunks in the places of those ``definitions`` that its texts
    have just once; the others stay text."""
    cut = list(parts)
    for definition in sorted(definitions, key=len, reverse=True):
        places = [
            index for index, part in enumerate(cut) if isinstance(part, str) and definition in part
        ]
        if len(places) == 1:
            before, *behind = str(cut[places[0]]).split(definition)
            if len(behind) == 1:
                cut[places[0] : places[0] + 1] = [before, definitions[definition], *behind]
    return cut


def _alike(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    shorter = min(len(one), len(other))
    return bisect_left(
        range(shorter), True, key=lambda index: one[: index + 1] != other[: index + 1]
    )
