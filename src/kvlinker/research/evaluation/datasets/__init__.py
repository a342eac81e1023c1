"""Data sets by name or path. The format of a file is recognised by its records' fields."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from kvlinker.errors import InvalidRequestError
from kvlinker.research.evaluation.contexts import ContextSplitter
from kvlinker.research.evaluation.datasets.base import Format, Source
from kvlinker.research.evaluation.datasets.cacheblend import CACHEBLEND
from kvlinker.research.evaluation.datasets.continuations import CONTINUATIONS
from kvlinker.research.evaluation.datasets.kv_retrieval import KV_RETRIEVAL
from kvlinker.research.evaluation.datasets.longbench import LONGBENCH
from kvlinker.research.evaluation.datasets.needle import needle_examples
from kvlinker.research.evaluation.datasets.passages import PASSAGES
from kvlinker.research.evaluation.datasets.records import Record, read_records
from kvlinker.research.evaluation.datasets.samsum import SAMSUM
from kvlinker.research.evaluation.examples import Dataset, Example, Skipped

FORMATS: tuple[Format, ...] = (PASSAGES, CONTINUATIONS, LONGBENCH, CACHEBLEND, KV_RETRIEVAL, SAMSUM)

BUNDLED = {name: Path(__file__).parents[1] / "data" / f"{name}.jsonl.gz" for name in ("reader", "reader-long", "prose")}
"""Data sets that ship with kvlinker."""

__all__ = ["BUNDLED", "FORMATS", "load_dataset"]


def load_dataset(
    name_or_path: str, splitter: ContextSplitter, *, limit: int | None = None, tasks: Collection[str] = ()
) -> Dataset:
    """A bundled data set, a file of records, or a folder of texts to hide needles in.

    At most ``limit`` examples, of the named tasks only if ``tasks`` has any. Raises InvalidRequestError for a path that
    does not exist, an unknown schema, and data without any usable example.
    """
    path = BUNDLED.get(name_or_path, Path(name_or_path))
    if path.is_dir():
        source = Source(path.name, splitter)
        found: Iterator[Example | Skipped] = iter(needle_examples(path, source))
    elif path.is_file():
        source = Source(path.name.split(".")[0], splitter)
        found = _read_file(path, source)
    else:
        raise InvalidRequestError(
            f"No data set {name_or_path!r}: there is no such file or folder, and the data sets that ship with "
            f"kvlinker are {', '.join(BUNDLED)}.",
            param="dataset",
        )
    dataset = _collect(source.name, found, limit, tasks)
    if not dataset.examples:
        reasons = "; ".join(f"{skipped.where}: {skipped.reason}" for skipped in dataset.skipped[:3])
        wanted = f" of {', '.join(tasks)}" if tasks else ""
        raise InvalidRequestError(
            f"{path} has no usable example{wanted} ({reasons or 'none at all'}).", param="dataset"
        )
    return dataset


def _collect(name: str, found: Iterable[Example | Skipped], limit: int | None, tasks: Collection[str]) -> Dataset:
    examples: list[Example] = []
    skipped: list[Skipped] = []
    for entry in found:
        if isinstance(entry, Skipped):
            skipped.append(entry)
            continue
        if tasks and entry.task not in tasks:
            continue
        examples.append(entry)
        if len(examples) == limit:
            break
    return Dataset(name, tuple(examples), tuple(skipped))


def _read_file(path: Path, source: Source) -> Iterator[Example | Skipped]:
    entries = list(read_records(path))
    yield from (entry for entry in entries if isinstance(entry, Skipped))
    records = [entry for entry in entries if isinstance(entry, Record)]
    if records:
        yield from _format_of(records, path).read(records, source)


def _format_of(records: Sequence[Record], path: Path) -> Format:
    for record in records:
        for known in FORMATS:
            if known.accepts(record):
                return known
    schemas = "; ".join(f"{known.name}: {', '.join(known.fields)}" for known in FORMATS)
    raise InvalidRequestError(
        f"{path} fits no known schema: its first record has the fields {', '.join(records[0].fields)}. Known are "
        f"{schemas}.",
        param="dataset",
    )
