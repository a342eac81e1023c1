"""Groups a request's runs into attention calls: scattered tokens are too many for a call each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch

from kvlinker.embedded.batch import Batch, Run
from kvlinker.engine.attention import QUERY_BLOCK, Queries

CALL_COST = 2048
"""Work of one attention call besides its arithmetic, in query-key pairs."""

KEY_COST = 8
"""Work of reading one more key, in query-key pairs."""


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """Rows of the batch whose queries attend together to the request at ``slot``."""

    rows: slice
    slot: int
    queries: Queries


def group_queries(batch: Batch, device: torch.device) -> tuple[QueryGroup, ...]:
    """Join neighbouring runs of a request until the masked-out work of a group costs as much as another call.

    With tokens at even distances this is the size at which masked-out work and calls together cost least.
    """
    groups = []
    begin = 0
    for runs in _joined(batch.runs):
        end = begin + sum(len(run.tokens) for run in runs)
        positions = torch.cat([torch.arange(run.start, run.end) for run in runs]).to(device)
        groups.append(QueryGroup(slice(begin, end), runs[0].slot, Queries(positions)))
        begin = end
    return tuple(groups)


def group_requests(batch: Batch) -> tuple[QueryGroup, ...]:
    """Return one group per request, with all of its runs; positions stay on the CPU."""
    positions = torch.from_numpy(batch.positions)
    groups = []
    for slot, runs in groupby(batch.rows(), key=lambda found: found[0].slot):
        parts = [rows for _, rows in runs]
        rows = slice(parts[0].start, parts[-1].stop)
        groups.append(QueryGroup(rows, slot, Queries(positions[rows])))
    return tuple(groups)


def _joined(runs: tuple[Run, ...]) -> Iterator[list[Run]]:
    joined: list[Run] = []
    queries = wasted = 0
    for run in runs:
        if joined:
            wasted += queries * (run.end - joined[-1].end)  # all queries so far are masked up to the new end
            full = queries + len(run.tokens) > QUERY_BLOCK or wasted > CALL_COST + KEY_COST * run.end
            if full or run.slot != joined[-1].slot:
                yield joined
                joined, queries, wasted = [], 0, 0
        joined.append(run)
        queries += len(run.tokens)
    if joined:
        yield joined
