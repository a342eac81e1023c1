"""Reuses chunks behind other chunks than they were computed behind, and measures how far they are
off then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvlinker.base.types.chunk_scores import Contextualization
from kvlinker.base.types.chunks import Chunk
from kvlinker.linking.policies.cachecraft import context_impact, order_penalty, prefix_overlap
from kvlinker.prompting.segments import Prompt
from kvlinker_lab.figures.cachecraft.earlier_prompts import (
    ContextOrder,
    ask,
    cache_together,
    scores_of,
)
from kvlinker_lab.figures.lab import Lab, OpenReader
from kvlinker_lab.inspection import relative_kv_distance

MOST_CHUNKS = 10
"""The most chunks of a context that are looked at."""

FEWEST_CHUNKS = 4
"""The fewest chunks of a context that is looked at."""

KEPT = (0.25, 0.5, 0.75)
SHUFFLES = (1, 4, 64)
LAST = 2
"""The chunks at the end of a context whose order is compared."""

OTHERS, PARTS, ORDERS = "others", "parts", "orders"
"""The kinds of new contexts: other chunks only (β = 0); some of the old ones among others, in their
order (γ = 0); all of the old ones in another order (β = 1)."""


@dataclass(frozen=True, slots=True)
class ReusedChunk:
    """Holds one chunk in one new context, with Cache-Craft's scores of it."""

    kind: str
    """``OTHERS``, ``PARTS`` or ``ORDERS``."""
    example: int
    """The number of the example whose prompt the chunk stood in first."""
    tokens: int
    cci: float
    beta: float
    gamma: float
    outside: float
    """The share of earlier chunks in all the attention that the chunk gave to chunks, itself
    included."""
    deviations: tuple[float, ...]
    """‖KV − KV_full‖ / ‖KV_full‖, the mean over the chunk's tokens and all layers, by the
    percentage of its tokens that was computed again, in the order of their inter attention."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Holds a new prompt, and says which of its chunks are looked at."""

    kind: str
    prompt: Prompt
    chunks: tuple[tuple[int, int], ...]
    """Places in the prompt, each with the number of the example that the chunk comes from."""


def reuses(lab: Lab, *, limit: int, percents: Sequence[int] = (0,)) -> list[ReusedChunk]:
    """Put chunks of ``limit`` examples into new contexts of all kinds, and recompute each of
    ``percents`` of them.

    Every example's chunks (the first 10 at most; 4 at least, or it is left out) are computed behind
    one another in one prompt first. Only chunks that stood behind others there are looked at.
    """
    found: list[ReusedChunk] = []
    with lab.open_reader(limit=limit) as reader:
        olds = [
            old
            for example in reader.examples
            if len(old := _old_chunks(reader, example.passages, example.question))
        ]
        for index in range(len(olds)):
            lab.progress("new contexts", index, len(olds))
            for case in _cases(reader, olds, index):
                found += _measure(reader, case, percents)
    return found


def _old_chunks(reader: OpenReader, passages: Sequence[str], question: str) -> tuple[Chunk, ...]:
    """Return the passages as chunks computed behind one another; none if there are too few."""
    chunks = dict.fromkeys(reader.llm.builder.encode_chunk(passage) for passage in passages)
    few = list(chunks)[:MOST_CHUNKS]
    return cache_together(reader.llm, few, question).chunks if len(few) >= FEWEST_CHUNKS else ()


def _cases(reader: OpenReader, olds: Sequence[tuple[Chunk, ...]], index: int) -> Iterator[_Case]:
    """Yield all new contexts that begin with example ``index``, or that its chunks are put into."""
    old, generator = olds[index], np.random.default_rng(index)
    question = reader.examples[0].question

    def case(kind: str, chunks: Sequence[Chunk], looked_at: Iterable[tuple[int, int]]) -> _Case:
        return _Case(kind, ask(reader.llm, chunks, question), tuple(looked_at))

    foreign = [((index + place) % len(olds), place) for place in range(min(MOST_CHUNKS, len(olds)))]
    foreign = [(example, place) for example, place in foreign if place < len(olds[example])]
    placed = [(place, example) for place, (example, _) in enumerate(foreign)]
    yield case(OTHERS, [olds[example][place] for example, place in foreign], placed[1:])
    others = [chunk for chunk in olds[(index + 1) % len(olds)] if chunk not in old]
    for share in KEPT if others else ():
        kept = generator.random(len(old)) < share
        mixed = [
            chunk if kept[place] else others[place % len(others)] for place, chunk in enumerate(old)
        ]
        yield case(PARTS, mixed, [(int(place), index) for place in np.flatnonzero(kept) if place])
    for swaps in SHUFFLES:
        order = list(range(len(old)))
        for first in generator.integers(0, len(old) - LAST - 1, swaps).tolist():
            order[first], order[first + 1] = order[first + 1], order[first]
        yield case(
            ORDERS, [old[place] for place in order], [(place, index) for place in order[-LAST:]]
        )


def _measure(reader: OpenReader, case: _Case, percents: Sequence[int]) -> list[ReusedChunk]:
    """Measure the chunks of a case; those whose KV happens to be exact there are left out."""
    prompt = case.prompt
    looked_at = [
        (place, example) for place, example in case.chunks if not prompt.spans[place].exact
    ]
    if not looked_at:
        return []
    full = reader.inspector.inspect_prompt(prompt, "full")
    distances = [
        relative_kv_distance(
            full,
            reader.inspector.inspect_prompt(prompt, ContextOrder(percent) if percent else "naive"),
        )
        for percent in percents
    ]
    found = []
    for place, example in looked_at:
        span, before = prompt.spans[place], prompt.contents[:place]
        known = scores_of(reader.llm, prompt.chunks[place]).contextualization
        found.append(
            ReusedChunk(
                kind=case.kind,
                example=example,
                tokens=span.length,
                cci=context_impact(known),
                beta=prefix_overlap(known, before),
                gamma=order_penalty(known, before),
                outside=_outside(known),
                deviations=tuple(
                    float(distance[:, span.start : span.end].mean()) for distance in distances
                ),
            )
        )
    return found


def _outside(chunk: Contextualization) -> float:
    outside = sum(before.attention for before in chunk.context)
    return outside / (outside + chunk.intra)
