"""Measures what tiers' codecs make of a chunk's KV: room, error, and time on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer

from kvlinker.quality.bench.harness.benchmark import ChunkTokens, Repeat, Setup, benchmark
from kvlinker.quality.bench.harness.report import Report, Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.quality.evaluation.datasets import BUNDLED, Record, read_records
from kvlinker.quality.progress import Progress, silent

if TYPE_CHECKING:
    from kvlinker.store import ChunkKV
    from kvlinker.store.format.byte_source import BufferSource
    from kvlinker.store.format.chunk_file import EncodedKV

COLUMNS = ("codec", "bytes_per_token", "key_error", "value_error", "encode_ms", "decode_ms")

_KEY = "0" * 64


@benchmark("codecs")
def codecs(
    setup: Setup,
    *,
    chunks: Annotated[int, typer.Option(min=1, help="Chunks of prose.")] = 16,
    chunk_tokens: ChunkTokens = 512,
    repeat: Repeat = 5,
) -> Report:
    """Measure what tiers' codecs make of the KV of prose: room, error, and time on the
    processor."""
    subject = setup.subject(repeat=repeat)
    return run_codecs(
        subject, chunks=chunks, chunk_tokens=chunk_tokens, repeat=repeat, progress=setup.progress
    )


def codec_rows(
    kvs: Sequence[ChunkKV],
    *,
    repeat: int,
    codecs: Sequence[str] = (),
    progress: Progress = silent,
) -> list[Row]:
    """Make a row for each of the named codecs, or for all, of chunk files of these chunks.

    ``bytes_per_token`` counts whole files, scores and header included. ``key_error`` and
    ``value_error`` are the L2 norm of what is off over that of the numbers, all layers together.
    ``encode_ms`` and ``decode_ms`` are CPU time per chunk, checksums included, the mean over the
    chunks and the median of ``repeat`` rounds, in which codecs take turns, after one that does not
    count.
    """
    from kvlinker.store.format.chunk_file import decode_chunk, encode_chunk
    from kvlinker.store.format.codecs import find_codec, known_codecs

    found = [find_codec(name) for name in codecs or known_codecs()]
    files = {codec.name: [encode_chunk(_KEY, kv, codec) for kv in kvs] for codec in found}
    data = {name: [_bytes_of(file) for file in made] for name, made in files.items()}
    encoding: dict[str, list[float]] = {name: [] for name in files}
    decoding: dict[str, list[float]] = {name: [] for name in files}
    for turn in range(repeat + 1):
        progress(f"turn {turn} of {repeat}")
        for codec in found:
            begin = time.process_time()
            for kv in kvs:
                encode_chunk(_KEY, kv, codec)
            middle = time.process_time()
            for source in data[codec.name]:
                decode_chunk(source, _KEY)
            encoding[codec.name].append(middle - begin)
            decoding[codec.name].append(time.process_time() - middle)
    rows: list[Row] = []
    for name in files:
        decoded = [decode_chunk(source, _KEY) for source in data[name]]
        rows.append(
            {
                "codec": name,
                "bytes_per_token": sum(file.nbytes for file in files[name])
                / sum(kv.tokens for kv in kvs),
                "key_error": _relative_error(kvs, decoded, "key"),
                "value_error": _relative_error(kvs, decoded, "value"),
                "encode_ms": 1e3 * statistics.median(encoding[name][1:]) / len(kvs),
                "decode_ms": 1e3 * statistics.median(decoding[name][1:]) / len(kvs),
            }
        )
    return rows


def run_codecs(
    subject: MeasuredModel,
    *,
    chunks: int,
    chunk_tokens: int,
    repeat: int,
    progress: Progress = silent,
) -> Report:
    """Measure all codecs on the model's own KV of prose."""
    progress(f"computing {chunks} chunks of prose")
    kvs = prose_kvs(subject, chunks=chunks, chunk_tokens=chunk_tokens)
    return replace(
        subject.report(codec_rows(kvs, repeat=repeat, progress=progress)), columns=COLUMNS
    )


def prose_kvs(subject: MeasuredModel, *, chunks: int, chunk_tokens: int) -> list[ChunkKV]:
    """Compute the KV of the prose that ships with kvlinker, in ``chunks`` of ``chunk_tokens``."""
    records = [record for record in read_records(BUNDLED["prose"]) if isinstance(record, Record)]
    text = "".join(passage for record in records for passage in record.fields["passages"])
    with subject.llm(kv_slots=4 * chunk_tokens, disk_space=0) as llm:
        pieces = llm.split(text, method="fixed", max_tokens=chunk_tokens)[:chunks]
        made = [
            llm.store.get_computed(cache.chunk_key) for cache in llm.generate_context_cache(pieces)
        ]
    return [kv for kv in made if kv is not None]


def _bytes_of(file: EncodedKV) -> BufferSource:
    from kvlinker.store.format.byte_source import BufferSource

    return BufferSource(np.frombuffer(bytearray(b"".join(file.pieces())), dtype=np.uint8))


def _relative_error(kvs: Sequence[ChunkKV], decoded: Sequence[ChunkKV], part: str) -> float:
    """Return the L2 norm of the error in the keys or values of all chunks over that of the
    numbers."""
    import torch

    def numbers(chunks: Sequence[ChunkKV]) -> torch.Tensor:
        return torch.cat(
            [getattr(layer, part).double().flatten() for kv in chunks for layer in kv.layers]
        )

    given = numbers(kvs)
    return float((numbers(decoded) - given).norm() / given.norm())
