"""Caches the chunks that a plan lacks, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvlinker.base.types.chunks import LONGEST_NAME
from kvlinker.cli.documents.library import CacheLibrary
from kvlinker.cli.documents.plan import Plan, PlannedFile
from kvlinker.cli.documents.progress import Report

BATCH_TOKENS = 2048
"""The tokens of chunks, about, that are cached, entered in the catalog and reported together.
Chosen by hand."""


@dataclass(frozen=True, slots=True)
class CachedChunk:
    """Describes a cached chunk of a file, and where its text is in the file's."""

    id: str
    file: str
    index: int
    start: int
    end: int
    tokens: int
    new: bool


def cached_chunks(
    plan: Plan, library: CacheLibrary, report: Report, **options: Any
) -> Iterator[CachedChunk]:
    """Cache a plan's missing chunks, and yield all chunks in the order of the files, those that
    were cached already first. ``options`` are those of ``CacheLibrary.cache``."""
    total = sum(piece.tokens for piece in plan.missing)
    done = 0
    for document in plan.documents:
        for index, cached in sorted(document.cached.items()):
            start, end = int(cached.metadata["start"]), int(cached.metadata["end"])
            yield CachedChunk(cached.id, document.source, index, start, end, cached.tokens, False)
        name = Path(document.source).name
        for indices in _batches(document):
            report(name, done, total, "tokens")
            pieces = [document.missing[index] for index in indices]
            ids = library.cache(
                [piece.text for piece in pieces],
                [document.metadata(index) for index in indices],
                name=document.source[-LONGEST_NAME:],
                **options,
            )
            for index, piece, cache_id in zip(indices, pieces, ids, strict=True):
                place = (document.source, index, piece.start, piece.end)
                yield CachedChunk(cache_id, *place, piece.tokens, True)
            done += sum(piece.tokens for piece in pieces)
            report(name, done, total, "tokens")


def _batches(document: PlannedFile) -> Iterator[Sequence[int]]:
    """Yield the indices of the missing chunks, those together that begin within the same
    ``BATCH_TOKENS``."""
    starts = accumulate((piece.tokens for piece in document.missing.values()), initial=0)
    batch: list[int] = []
    number = 0
    for index, start in zip(document.missing, starts, strict=False):
        if batch and start // BATCH_TOKENS != number:
            yield batch
            batch = []
        number = start // BATCH_TOKENS
        batch.append(index)
    if batch:
        yield batch
