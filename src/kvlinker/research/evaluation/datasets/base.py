"""The interface of a format: how it is recognised, and how its records become examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvlinker.errors import InvalidRequestError
from kvlinker.research.evaluation.contexts import ContextSplitter
from kvlinker.research.evaluation.datasets.records import BadRecordError, Record
from kvlinker.research.evaluation.examples import Example, Skipped


@dataclass(frozen=True, slots=True)
class Source:
    """What examples are made with: the data set's name, and how contexts become passages."""

    name: str
    splitter: ContextSplitter


Reader = Callable[[Iterable[Record], Source], Iterator[Example | Skipped]]
"""All records of a file to examples, lazily and in order."""


@dataclass(frozen=True, slots=True)
class Format:
    """A schema of records; a file has it when a record has all of ``fields``."""

    name: str
    fields: tuple[str, ...]
    read: Reader

    def accepts(self, record: Record) -> bool:
        return all(name in record.fields for name in self.fields)


def one_by_one(parse: Callable[[Record, Source], Example]) -> Reader:
    """The reader of a format whose records are examples by themselves; ``parse`` may raise BadRecordError."""

    def read(records: Iterable[Record], source: Source) -> Iterator[Example | Skipped]:
        for record in records:
            try:
                yield parse(record, source)
            except (BadRecordError, InvalidRequestError) as error:
                yield Skipped(f"record {record.number}", str(error))

    return read
