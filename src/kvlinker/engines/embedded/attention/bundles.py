"""Groups the views that the native kernel computes together: sequences that see the same segments,
a cascade over these."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvlinker.engines.embedded.attention.views import View

MOST_SHARING_ROWS = 16
"""The most queries of a sequence that are computed together with other sequences'. More than that
fill the kernel's tiles alone, and would pay for partial results without gaining anything: with two
query heads per key head, two to sixteen sequences took 0.40 to 0.95 of the time together with up to
16 queries each, and 0.98 to 1.09 with 32."""


@dataclass(frozen=True, slots=True)
class Bundle:
    """Sequences that see the same segments."""

    members: tuple[slice, ...]
    """Every sequence's queries in the batch."""

    visits: tuple[tuple[View, ...], ...]
    """For every segment, each member's view of it, in the order of ``members``."""


def bundle_views(views: Sequence[View]) -> tuple[Bundle, ...]:
    """Group the segments by the sequences that see them.

    A query's results in several bundles must be merged. All segments that only one sequence sees
    are one bundle. A segment that it sees twice counts as two.
    """
    visits: defaultdict[tuple[int, ...], list[View]] = defaultdict(list)
    occurrences: Counter[tuple[int, int, int]] = Counter()
    for view in views:
        begin, end = view.rows.start, view.rows.stop
        occurrence = occurrences[view.segment, begin, end]
        occurrences[view.segment, begin, end] += 1
        alone = (begin, end) if end - begin > MOST_SHARING_ROWS else ()
        visits[view.segment, occurrence, *alone].append(view)
    bundles: defaultdict[tuple[tuple[int, int], ...], list[tuple[View, ...]]] = defaultdict(list)
    for visit in visits.values():
        visit.sort(key=lambda view: (view.rows.start, view.rows.stop))
        bundles[tuple((view.rows.start, view.rows.stop) for view in visit)].append(tuple(visit))
    return tuple(
        Bundle(tuple(slice(*member) for member in members), tuple(found))
        for members, found in bundles.items()
    )
