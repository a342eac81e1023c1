"""The command ``kvlinker ingest``: its options, and the order of its work."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ByteSize

from kvlinker.base.errors import did_you_mean
from kvlinker.base.types.texts import Piece
from kvlinker.cli.console import BAD_USAGE, FAILURE, INTERRUPTED, fail, failures, warn
from kvlinker.cli.documents.caching import cached_chunks
from kvlinker.cli.documents.library import MODEL_SETTINGS, CacheLibrary, Storage, open_library
from kvlinker.cli.documents.plan import (
    Plan,
    Splitting,
    find_files,
    named_from_root,
    plan_ingestion,
)
from kvlinker.cli.documents.progress import show_progress
from kvlinker.cli.options import ApiKey, Url, settings_options
from kvlinker.settings import SHARED_TIER_SETTINGS, Settings

WORTH_A_CODEC_BYTES = 64 * 2**20
"""The size of KV from which another codec is suggested."""


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
    """Split files and folders into chunks, and cache them ahead of time.

    A terminal shows a bar. Elsewhere a line of JSON is printed per chunk as it goes: id, file,
    index, start, end, tokens, new. start and end count characters of the file's text. Chunks that
    are already cached are not computed again, so that an interrupted run continues where it ended.
    PDF, HTML, DOCX and EPUB files become Markdown. Files without text are left out.
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
            with show_progress() as report:
                splitting = Splitting(method, max_tokens)
                plan = plan_ingestion(paths, files, library, splitting, report)
            for line in plan.left_out:
                warn(line)
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
    """Cache missing chunks; print all chunks in the order of the files, unless a person would read
    them."""
    pieces = plan.missing
    before = library.storage() if pieces else None
    if before is not None:
        _tell_cost(pieces, before)
    options = {} if ttl is None else {"ttl": ttl}
    with show_progress() as report:
        for chunk in cached_chunks(plan, library, report, **options):
            if not sys.stdout.isatty():
                typer.echo(json.dumps(asdict(chunk), ensure_ascii=False))
    library.settle()
    if before is not None:
        _tell_taken(pieces, before, library.storage())


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
