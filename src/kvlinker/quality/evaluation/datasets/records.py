"""Reads the records of a JSON or JSON Lines file, plain or gzipped, and checks their fields."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvlinker.base.errors import InvalidRequestError
from kvlinker.quality.evaluation.examples import Skipped


class BadRecordError(Exception):
    """Raised for a record that is not an example; the message says why."""


class Record(NamedTuple):
    """Holds one entry of a file."""

    number: int
    """The line, or the place in a list, from 1."""
    fields: Mapping[str, Any]


def read_records(path: Path) -> Iterator[Record | Skipped]:
    """Yield the entries of a ``.json`` list or of JSON Lines; those that are no objects are
    skipped.

    Raises InvalidRequestError for a file that cannot be read.
    """
    name = path.name.removesuffix(".gz")
    text = _text(path)
    if name.endswith(".json"):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"{path} is not valid JSON: {error}. JSON Lines end in .jsonl."
            ) from error
        if not isinstance(entries, list):
            raise InvalidRequestError(
                f"{path} holds no list of records, but {type(entries).__name__}."
            )
        yield from (_check_record(number, entry) for number, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # other ends of lines may be in texts
        if line.strip():
            try:
                yield _check_record(number, json.loads(line))
            except (ValueError, RecursionError) as error:
                yield Skipped(f"record {number}", f"not valid JSON: {error}")


def text_field(record: Record, name: str) -> str:
    """Return a field that must hold text that is not blank. Raises BadRecordError."""
    value = field(record, name)
    if not isinstance(value, str):
        raise BadRecordError(f"{name!r} is {type(value).__name__}, but must be text")
    if not value.strip():
        raise BadRecordError(f"{name!r} is empty")
    return value


def texts_field(record: Record, name: str) -> tuple[str, ...]:
    """Return a field that must hold one text or a list of them, nested lists included; blank ones
    are dropped.

    Raises BadRecordError if none is left.
    """
    texts = tuple(text for text in _flatten(field(record, name), name) if text.strip())
    if not texts:
        raise BadRecordError(f"{name!r} is empty")
    return texts


def _flatten(value: Any, name: str) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _flatten(entry, name)
    else:
        raise BadRecordError(f"{name!r} holds {type(value).__name__}, but must hold texts")


def field(record: Record, name: str) -> Any:
    """Return a field that must be there. Raises BadRecordError."""
    if name not in record.fields:
        raise BadRecordError(f"{name!r} is missing")
    return record.fields[name]


def _check_record(number: int, entry: Any) -> Record | Skipped:
    if isinstance(entry, dict):
        return Record(number, entry)
    return Skipped(f"record {number}", f"a record must be an object, not {type(entry).__name__}")


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
        return (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise InvalidRequestError(f"Cannot read {path}: {error}", param="dataset") from error
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{path} is not UTF-8 text: {error}", param="dataset") from error
