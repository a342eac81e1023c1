"""Plans an ingestion: its files, which of their chunks are cached already, which are to be cached,
and which are stale."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlinker.base.errors import InvalidRequestError
from kvlinker.base.types.chunks import LONGEST_VALUE
from kvlinker.base.types.texts import Piece
from kvlinker.cli.documents.library import CacheLibrary, ExistingCache
from kvlinker.cli.documents.progress import Report
from kvlinker.prompting.documents import NoTextError, read_document

ORIGIN = {"origin": "kvlinker ingest"}
"""The pair of metadata that all context caches of ingestions have."""

SHOWN_FILES = 3
"""The most files that a warning about several names."""

_NUMBERS = ("chunks", "index", "start", "end")


@dataclass(frozen=True, slots=True)
class Splitting:
    """Names the splitter that cuts texts into chunks, and their most tokens."""

    method: str
    max_tokens: int

    def version_of(self, content: bytes) -> str:
        """Name the chunks that a file's content becomes: others have another name."""
        digest = hashlib.sha256(content).hexdigest()
        return hashlib.sha256(f"{digest} {self.method} {self.max_tokens}".encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file's chunks: those that are cached, and those that are to be cached, by their index in
    the file."""

    source: str
    version: str
    """See ``Splitting.version_of``."""

    chunks: int
    cached: Mapping[int, ExistingCache]
    missing: Mapping[int, Piece]

    def metadata(self, index: int) -> dict[str, str]:
        """Return the metadata of one of the missing chunks: the next run finds it by that."""
        piece = self.missing[index]
        return {
            **ORIGIN,
            "source": self.source,
            "version": self.version,
            "chunks": str(self.chunks),
            "index": str(index),
            "start": str(piece.start),
            "end": str(piece.end),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Lists the chunks that an ingestion caches, and stale context caches."""

    documents: Sequence[PlannedFile]

    stale: Sequence[ExistingCache]
    """Context caches of files that are gone, and of earlier versions of changed files."""

    left_out: Sequence[str]
    """Which files have no chunks, and why: a line for each reason."""

    @property
    def missing(self) -> list[Piece]:
        """All pieces that are to be cached."""
        return [piece for document in self.documents for piece in document.missing.values()]


def named_from_root(path: Path) -> Path:
    """Return the absolute path of an existing file or folder, without ``..``: what leads to the
    last one is resolved, and links behind it keep their names."""
    parts = path.absolute().parts
    behind = next((place for place in range(len(parts), 0, -1) if parts[place - 1] == ".."), 0)
    return Path(*parts[:behind]).resolve().joinpath(*parts[behind:]) if behind else Path(*parts)


def find_files(paths: Sequence[Path], glob: str) -> Iterator[Path]:
    """Yield the files among ``paths``, which are absolute, and those in folders that match
    ``glob``, each once; hidden ones in folders are left out. Raises ValueError or
    NotImplementedError for a pattern that is none."""
    found: dict[Path, None] = {}
    for start in paths:
        if start.is_file():
            found[start] = None
            continue
        for file in sorted(start.rglob(glob)):
            hidden = any(part.startswith(".") for part in file.relative_to(start).parts)
            if file.is_file() and not hidden:
                found[file] = None
    yield from found


def plan_ingestion(
    paths: Sequence[Path],
    files: Sequence[Path],
    library: CacheLibrary,
    splitting: Splitting,
    report: Report,
) -> Plan:
    """Read the files, and compare them with the cached chunks. Files without text, and those that
    are too long for a server to split, are left out.

    A file that was ingested in this version before is read, but neither converted nor split.
    ``paths`` are the user's arguments, absolute: a file that is gone is one of them or was below
    one. Files are reported as they are read. Raises the errors of ``CacheLibrary.split``.
    """
    known: defaultdict[str, list[ExistingCache]] = defaultdict(list)
    for cached in library.caches(ORIGIN):
        if not all(cached.metadata.get(name, "").isdecimal() for name in _NUMBERS):
            continue  # its metadata was changed since
        known[cached.metadata.get("source", "")].append(cached)
    documents = []
    stale: list[ExistingCache] = []
    left_out: defaultdict[str, list[str]] = defaultdict(list)
    for number, path in enumerate(files):
        report(path.name, number, len(files), "files")
        source = str(path)[-LONGEST_VALUE:]
        try:
            document = _plan_file(path, source, known[source], library, splitting)
        except (OSError, UnicodeEncodeError) as error:
            # what is cached of it may still be right
            left_out[_reason(error)].append(_printable(path))
        except NoTextError as error:
            left_out[str(error)].append(_printable(path))
            stale += known[source]
        except InvalidRequestError as error:
            if error.param != "input":
                raise
            left_out[str(error)].append(_printable(path))
        else:
            documents.append(document)
            current = {cached.id for cached in document.cached.values()}
            stale += [cached for cached in known[source] if cached.id not in current]
    for source, caches in known.items():
        if _is_gone(source, paths):
            stale += caches
    lines = [f"{_listed(names)} left out: {reason}" for reason, names in left_out.items()]
    return Plan(documents, stale, lines)


def _plan_file(
    path: Path,
    source: str,
    known: Sequence[ExistingCache],
    library: CacheLibrary,
    splitting: Splitting,
) -> PlannedFile:
    source.encode()
    content = path.read_bytes()
    version = splitting.version_of(content)
    cached: dict[int, ExistingCache] = {}
    chunks = None
    for one in known:
        if one.usable and one.metadata.get("version") == version:
            cached.setdefault(int(one.metadata["index"]), one)
            chunks = int(one.metadata["chunks"])
    if chunks is not None and len(cached) == chunks:
        return PlannedFile(source, version, chunks, cached, {})
    text = read_document(content, path.suffix).text
    pieces = library.split(text, method=splitting.method, max_tokens=splitting.max_tokens)
    missing = {index: piece for index, piece in enumerate(pieces) if index not in cached}
    return PlannedFile(source, version, len(pieces), cached, missing)


def _is_gone(source: str, paths: Sequence[Path]) -> bool:
    """Return whether a file is at, or below, one of the paths by its name, but no longer there."""
    path = Path(source)
    if not any(path.is_relative_to(each) for each in paths):
        return False
    try:
        return not path.exists()
    except OSError:  # its folder may not be looked into
        return False


def _listed(names: Sequence[str]) -> str:
    """Name a file, or say how many there are and name the first."""
    if len(names) == 1:
        return f"{names[0]} is"
    shown = ", ".join(Path(name).name for name in names[:SHOWN_FILES])
    rest = f" and {len(names) - SHOWN_FILES:,} more" if len(names) > SHOWN_FILES else ""
    return f"{len(names):,} files ({shown}{rest}) are"


def _printable(path: Path) -> str:
    return str(path).encode(errors="replace").decode()


def _reason(error: Exception) -> str:
    match error:
        case OSError():
            return error.strerror or str(error)
        case UnicodeEncodeError():
            return "its name is not UTF-8"
    return str(error)
