"""The command ``kvlinker ingest``: its options, and the order of its work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ByteSize

from kvlinker.base.errors import did_you_mean
from kvlinker.base.types.context_cache import LONGEST_NAME
from kvlinker.base.types.texts import Piece
from kvlinker.cli.console import BAD_USAGE, FAILURE, fail, failures, warn
from kvlinker.cli.documents.library import MODEL_SETTINGS, CacheLibrary, Storage, open_library
from kvlinker.cli.documents.plan import (
    Plan,
    PlannedFile,
    Splitting,
    find_files,
    named_from_root,
    plan_ingestion,
)
from kvlinker.cli.documents.progress import Advance, show_progress
from kvlinker.cli.options import ApiKey, Url, settings_options
from kvlinker.settings import SHARED_TIER_SETTINGS, Settings

BATCH_TOKENS = 2048
"""Chunks of about so many tokens are cached, entered in the catalog, and printed together."""

WORTH_A_CODEC_BYTES = 64 * 2**20
"""The size of KV from which another codec is suggested."""

INTERRUPTED = 130


@settings_options(
    *MODEL_SETTINGS, "generation_context", "disk_space", "disk_codec", *SHARED_TIER_SETTINGS
)
def ingest(
    settings: Settings,
    paths: Annotated[
        list[Path], typer.Argument(exists=True, help="Files and folders.", metavar="PATH...")
    ],
    glob: Annotated[str, typer.Option(help="Which files of folders.")] = "*",
    method: Annotated[
        str,
        typer.Option(
            help=(
                "What a chunk is: fixed, sentence, paragraph, passage, markdown, or what a plugin"
                " adds."
            )
        ),
    ] = "passage",
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a chunk.")] = 512,
    ttl: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds to keep the context caches; for ever by default."),
    ] = None,
    sync: Annotated[
        bool,
        typer.Option(
            "--sync", help="Remove what was cached of files that are gone or have changed."
        ),
    ] = False,
    url: Url = None,
    api_key: ApiKey = None,
) -> None:
    r"""Split files and folders into chunks, and cache them ahead of time.

    Prints a line of JSON per chunk as it goes: id, file, index, start, end, tokens, new. start and
    end count characters of the file's text. Chunks that are already cached are not computed again,
    so that an interrupted run continues where it ended. Of PDF, HTML, DOCX and EPUB files (pip
    install 'kvlinker\[documents]'), the text is Markdown. Files without text are left out.
    """
    if url is None:
        _check_method(method)
    paths = [named_from_root(path) for path in paths]
    try:
        files = list(find_files(paths, glob))
    except (ValueError, NotImplementedError) as error:
        raise fail(
            f"--glob is {glob!r}, but must be a pattern such as '*.md', which files below the"
            f" folders match: {error}",
            BAD_USAGE,
        ) from error
    if not files and not sync:
        raise fail("there are no such files, and no text to cache", FAILURE)
    try:
        with failures(), open_library(settings, url=url, api_key=api_key) as library:
            plan = plan_ingestion(paths, files, library, Splitting(method, max_tokens))
            if not plan.documents and not sync:
                raise fail("there is no text in these files", FAILURE)
            _run(plan, library, ttl)
            _finish(plan, library, sync=sync)
    except KeyboardInterrupt:
        raise fail("interrupted: the same command goes on from here", INTERRUPTED) from None


def _check_method(method: str) -> None:
    """End the command for an unknown method before the model is loaded; a server knows its own."""
    from kvlinker.prompting.splitting import splitters

    if method not in (known := splitters()):
        allowed = f"it must be one of {', '.join(known)}.{did_you_mean(method, known)}"
        raise fail(f"--method is {method!r}: {allowed}", BAD_USAGE)


def _run(plan: Plan, library: CacheLibrary, ttl: float | None) -> None:
    """Cache missing chunks, and print all chunks in the order of the files."""
    pieces = plan.missing
    before = library.storage() if pieces else None
    if before is not None:
        _tell_cost(pieces, before)
    options = {} if ttl is None else {"ttl": ttl}
    with show_progress(sum(piece.tokens for piece in pieces)) as advance:
        for document in plan.documents:
            _print_cached(document)
            _cache_missing(document, library, options, advance)
    library.settle()
    if before is not None:
        _tell_taken(pieces, before, library.storage())


def _print_cached(document: PlannedFile) -> None:
    for index, cached in sorted(document.cached.items()):
        start, end = int(cached.metadata["start"]), int(cached.metadata["end"])
        _print(document, index, cached.id, start, end, cached.tokens, new=False)


def _cache_missing(
    document: PlannedFile, library: CacheLibrary, options: dict[str, Any], advance: Advance
) -> None:
    for indices in _batches(document):
        pieces = [document.missing[index] for index in indices]
        ids = library.cache(
            [piece.text for piece in pieces],
            [document.metadata(index) for index in indices],
            name=document.source[-LONGEST_NAME:],
            **options,
        )
        for index, piece, cache_id in zip(indices, pieces, ids, strict=True):
            _print(document, index, cache_id, piece.start, piece.end, piece.tokens, new=True)
        advance(Path(document.source).name, sum(piece.tokens for piece in pieces))


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


def _print(
    document: PlannedFile,
    index: int,
    cache_id: str,
    start: int,
    end: int,
    tokens: int,
    *,
    new: bool,
) -> None:
    line = {
        "id": cache_id,
        "file": document.source,
        "index": index,
        "start": start,
        "end": end,
        "tokens": tokens,
        "new": new,
    }
    typer.echo(json.dumps(line, ensure_ascii=False))


def _finish(plan: Plan, library: CacheLibrary, *, sync: bool) -> None:
    """Remove stale context caches, if the options ask for it, and sum up."""
    new, old = len(plan.missing), sum(len(document.cached) for document in plan.documents)
    if sync:
        for cached in plan.stale:
            library.delete(cached.id)
    files = f"{len(plan.documents):,} file{'' if len(plan.documents) == 1 else 's'}"
    done = f"{new:,} chunks cached" if new else "nothing new"
    removed = f", {len(plan.stale):,} removed" if sync and plan.stale else ""
    typer.echo(
        f"kvlinker: {done}{removed}; {old:,} chunks of {files} were cached already", err=True
    )
    if plan.stale and not sync:
        warn(
            f"{len(plan.stale):,} chunks of files that are gone or have changed are still cached;"
            " --sync removes them"
        )


def _tell_cost(pieces: Sequence[Piece], storage: Storage) -> None:
    """Report how much space the KV of these pieces will take, before it is computed; warn if the
    disk tier has no room."""
    tokens = sum(piece.tokens for piece in pieces)
    size = storage.kv_bytes
    nbytes = tokens * size.per_token + len(pieces) * size.per_chunk
    free = max(0, storage.budget_bytes - storage.used_bytes)
    written = "" if storage.codec == "raw" else f" as computed, and less on disk as {storage.codec}"
    typer.echo(
        f"kvlinker: to cache: {len(pieces):,} chunks, {tokens:,} tokens: {_size(nbytes)} of KV for "
        f"{_size(_text_bytes(pieces))} of text{written}; the disk tier has {_size(free)} free",
        err=True,
    )
    if storage.codec == "raw" and nbytes >= WORTH_A_CODEC_BYTES:
        typer.echo(
            "kvlinker: of KV in 16 bits, disk_codec int8 takes about half of that, and int4 less"
            " than a third",
            err=True,
        )
    if storage.codec == "raw" and nbytes > free:
        warn(
            "the disk tier has no room for all of it: chunks that are used least will be evicted,"
            f" and computed again when they are used. Raise disk_space by {_size(nbytes - free)},"
            " or take another disk_codec"
        )


def _tell_taken(pieces: Sequence[Piece], before: Storage, after: Storage) -> None:
    """Report how much disk space the KV of these pieces has taken."""
    taken = after.used_bytes - before.used_bytes
    typer.echo(
        f"kvlinker: {_size(max(0, taken))} on disk for {_size(_text_bytes(pieces))} of text",
        err=True,
    )


def _text_bytes(pieces: Sequence[Piece]) -> int:
    """Return the length of the pieces' text in UTF-8."""
    return sum(len(piece.text.encode()) for piece in pieces)


def _size(nbytes: int) -> str:
    return ByteSize(nbytes).human_readable(decimal=True, separator=" ")
