"""Finds data sets by name or path. The format of a file is recognised by its records' fields.

Every module of this package registers the formats that it reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets import facts
from kvlinker.quality.evaluation.datasets.formats import (
    Format,
    Source,
    known_formats,
    one_by_one,
    recognise,
    register,
    short_question,
)
from kvlinker.quality.evaluation.datasets.records import (
    BadRecordError,
    Record,
    field,
    read_records,
    text_field,
    texts_field,
)
from kvlinker.quality.evaluation.datasets.retrieval import needle_examples
from kvlinker.quality.evaluation.examples import Dataset, Example, Skipped

__all__ = [
    "BUNDLED",
    "BadRecordError",
    "Format",
    "Record",
    "Source",
    "field",
    "known_formats",
    "load_dataset",
    "one_by_one",
    "read_records",
    "register",
    "short_question",
    "text_field",
    "texts_field",
]

BUNDLED = {
    name: Path(__file__).parents[1] / "data" / f"{name}.jsonl.gz"
    for name in (
        "reader",
        "reader-long",
        "reader-hard",
        "reader-hard-long",
        "reader-choice",
        "prose",
    )
}
"""The files of the data sets that ship with kvlinker, by name."""

MADE = {facts.NAME: facts.fact_examples}
"""The functions that make the other data sets that ship with kvlinker, by name."""

HAYSTACK = "needle"
"""The format of a folder of texts."""


def load_dataset(
    name_or_path: str,
    splitter: ContextSplitter,
    *,
    limit: int | None = None,
    tasks: Collection[str] = (),
) -> Dataset:
    """Load a bundled data set, a file of records, or a folder of texts to hide needles in.

    At most ``limit`` examples are taken, of the named tasks only if ``tasks`` has any. Raises
    InvalidRequestError for a path that does not exist, a file of no known format, and data without
    any usable example.
    """
    path = BUNDLED.get(name_or_path, Path(name_or_path))
    found: Iterator[Example | Skipped]
    if name_or_path in MADE:
        source, known, found = Source(name_or_path, splitter), "made", MADE[name_or_path]()
    elif path.is_dir():
        source, known = Source(path.name, splitter), HAYSTACK
        found = needle_examples(path, source)
    elif path.is_file():
        source = Source(path.name.split(".")[0], splitter)
        known, found = _read_file(path, source)
    else:
        raise InvalidRequestError(
            f"No data set {name_or_path!r}: there is no such file or folder, and the data sets that"
            f" ship with kvlinker are {', '.join((*BUNDLED, *MADE))}.",
            param="dataset",
        )
    dataset = _collect(source.name, known, found, limit, tasks)
    if not dataset.examples:
        reasons = "; ".join(f"{skipped.where}: {skipped.reason}" for skipped in dataset.skipped[:3])
        wanted = f" of {', '.join(tasks)}" if tasks else ""
        read_as = f", read as {known}," if known else ""
        raise InvalidRequestError(
            f"{path}{read_as} has no usable example{wanted} ({reasons or 'none at all'}).",
            param="dataset",
        )
    return dataset


def _collect(
    name: str,
    known: str,
    found: Iterable[Example | Skipped],
    limit: int | None,
    tasks: Collection[str],
) -> Dataset:
    examples: list[Example] = []
    skipped: list[Skipped] = []
    other_tasks: dict[str, None] = {}
    for entry in found:
        if isinstance(entry, Skipped):
            skipped.append(entry)
            continue
        if tasks and entry.task not in tasks:
            other_tasks[entry.task] = None
            continue
        examples.append(entry)
        if len(examples) == limit:
            break
    if other_tasks and not examples and not skipped:
        raise InvalidRequestError(
            f"{name} has no usable example of {', '.join(tasks)}: its tasks are"
            f" {', '.join(other_tasks)}.",
            param="tasks",
        )
    return Dataset(name, known, tuple(examples), tuple(skipped))


def _read_file(path: Path, source: Source) -> tuple[str, Iterator[Example | Skipped]]:
    """Return the name of the file's format, empty if it has no record, and read its records."""
    entries = list(read_records(path))
    records = [entry for entry in entries if isinstance(entry, Record)]
    broken = [entry for entry in entries if isinstance(entry, Skipped)]
    if not records:
        return "", iter(broken)
    known = recognise(records, path)
    return known.name, chain(broken, known.read(records, source))
