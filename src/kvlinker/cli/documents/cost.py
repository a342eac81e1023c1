"""Reports the disk space of an ingestion, before and after."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from pydantic import ByteSize

from kvlinker.base.types.texts import Piece
from kvlinker.cli.console import warn
from kvlinker.cli.documents.library import Storage

WORTH_A_CODEC_BYTES = 64 * 2**20
"""The size of KV from which another codec is suggested."""


def tell_cost(pieces: Sequence[Piece], storage: Storage) -> None:
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


def tell_taken(pieces: Sequence[Piece], before: Storage, after: Storage) -> None:
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
