"""kvlinker's own policy for which KV is placed: that of a chunk's place in the row of texts."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvlinker.base.types.chunks import LAST_PLACE, Chunk
from kvlinker.linking.evidence import Evidence, Library
from kvlinker.linking.policy import Needs, Policy
from kvlinker.linking.registry import register
from kvlinker.prompting.segments import Prompt


@register
class Row(Policy):
    """Take of each chunk the KV of its place in the row of chunks, as it is behind others that it
    stood together with, so that the model does not take several chunks for one another (ours).
    Recompute chunks that have no such KV yet; it is computed later, while there is nothing else to
    do."""

    family = "row"

    needs = Needs(places=True)

    def arrange(self, prompt: Prompt, library: Library) -> Prompt:
        return prompt.with_chunks(
            chunk if span.exact or chunk.contextual else _stored(chunk, index, library)
            for index, (chunk, span) in enumerate(zip(prompt.chunks, prompt.spans, strict=True))
        )

    def select(self, prompt: Prompt, evidence: Evidence) -> NDArray[np.bool_]:
        selected = np.zeros(len(prompt), dtype=np.bool_)
        for chunk, span in list(zip(prompt.chunks, prompt.spans, strict=True))[1:]:
            lacks = not (chunk.place or span.exact or chunk.contextual)
            selected[span.start : span.end] = lacks
        return selected


def _stored(chunk: Chunk, place: int, library: Library) -> Chunk:
    """Return the chunk with its KV for this place; or if it was only computed in shorter rows, for
    the last place of those. Unchanged if it is the first in the row, or none is stored."""

    def is_stored(place: int) -> bool:
        return library.has(chunk.at_place(place))

    own = min(place, LAST_PLACE)
    if own and is_stored(own):
        return chunk.at_place(own)
    in_shorter_rows = list(takewhile(is_stored, range(1, own)))
    return chunk.at_place(in_shorter_rows[-1]) if in_shorter_rows else chunk
