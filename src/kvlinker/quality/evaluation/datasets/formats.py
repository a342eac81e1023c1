"""Defines formats of data sets, registers them by name, and recognises them by the fields of
records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.registry import Registry
from kvlinker.quality.evaluation.contexts import ContextSplitter
from kvlinker.quality.evaluation.datasets.records import BadRecordError, Record
from kvlinker.quality.evaluation.examples import Example, Skipped


@dataclass(frozen=True, slots=True)
class Source:
    """The data set that examples belong to, and the splitter of their contexts."""

    name: str
    """The data set's name."""
    splitter: ContextSplitter
    """Cuts contexts into passages."""


RecordReader = Callable[[Iterable[Record], Source], Iterator[Example | Skipped]]
"""Turns all records of a file into examples, lazily and in order."""


def _no_objection(_record: Record) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Format:
    """Describes one schema of records, and reads it."""

    name: str
    fields: tuple[str, ...]
    """The fields that every record has."""
    read: RecordReader
    objection: Callable[[Record], str | None] = _no_objection
    """Says why a record that has the fields is of another format all the same; None if it is
    not."""

    def mismatch(self, record: Record) -> str | None:
        """Say why the record is not of this format; return None if it is."""
        missing = [name for name in self.fields if name not in record.fields]
        return f"lacks {', '.join(missing)}" if missing else self.objection(record)


_registry: Registry[Format] = Registry(
    "format", own="kvlinker.quality.evaluation.datasets", group="kvlinker.dataset_formats"
)


def register(known: Format) -> Format:
    """Make a format known under its name. Raises ValueError if another format has the name."""
    return _registry.add(known.name, known)


def known_formats() -> Mapping[str, Format]:
    """Return all registered formats by name, those of installed packages included."""
    return _registry.known()


def recognise(records: Sequence[Record], path: Path) -> Format:
    """Return the format that most records are of, and of several the one with the most fields.

    Raises InvalidRequestError if no record is of any, with what each format misses in the first
    record.
    """
    formats = list(known_formats().values())
    counts = {
        known.name: sum(known.mismatch(record) is None for record in records) for known in formats
    }
    best = max(formats, key=lambda known: (counts[known.name], len(known.fields)))
    if counts[best.name]:
        return best
    first = records[0]
    formats.sort(key=lambda known: sum(name not in first.fields for name in known.fields))
    reasons = "; ".join(
        f"{known.name} ({', '.join(known.fields)}): {known.mismatch(first)}" for known in formats
    )
    raise InvalidRequestError(
        f"{path} is of no known format: its first record has the fields"
        f" {', '.join(first.fields) or '(none)'}. Here is what speaks against each format:"
        f" {reasons}.",
        param="dataset",
    )


def one_by_one(parse: Callable[[Record, Source], Example]) -> RecordReader:
    """Make the reader of a format whose records are examples by themselves; ``parse`` may raise
    BadRecordError."""

    def read(records: Iterable[Record], source: Source) -> Iterator[Example | Skipped]:
        for record in records:
            try:
                yield parse(record, source)
            except (BadRecordError, InvalidRequestError) as error:
                yield Skipped(f"record {record.number}", str(error))

    return read


def short_question(question: str) -> str:
    """Return the prompt of a question whose answer is a few words (the wording follows
    LongBench's)."""
    return (
        "Answer the question based on the given passages. Only give me the answer and do not"
        f" output any other words.\n\nQuestion: {question.strip()}\nAnswer:"
    )
