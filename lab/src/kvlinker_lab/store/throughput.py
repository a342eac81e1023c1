"""Chunks into the disk tier and out of it, beside plain copies and reads of the same files."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch

from kvlinker.base.events import Events
from kvlinker.engines.embedded.model.anatomy import keeping
from kvlinker.quality.bench.harness.measurement import Workload, chunk_files
from kvlinker.quality.bench.harness.report import Row
from kvlinker.quality.bench.harness.subject import MeasuredModel
from kvlinker.store import ChunkKV, DiskTier, LayerKV
from kvlinker.store.format.codecs import find_codec
from kvlinker_lab.store.files import copy_seconds, read_seconds, total_bytes
from kvlinker_lab.store.rows import store_row


def throughput_rows(
    subject: MeasuredModel,
    workload: Workload,
    codecs: Sequence[str],
    *,
    repeat: int,
    progress: Callable[[str], None],
) -> list[Row]:
    """All chunks of a prompt put and got, one after the other, in turn with the copies; medians
    after one warm-up."""
    kv = _random_kv(subject, workload.chunk_tokens)
    keys = [sha256(str(index).encode()).hexdigest() for index in range(workload.chunks)]
    rows: list[Row] = []
    for codec in codecs:
        measured = []
        for turn in range(repeat + 1):
            progress(f"put and get {codec}, turn {turn} of {repeat}")
            measured.append(_measure(keys, kv, codec))
        for case, plain, told in (
            ("put", "copy", "copying the files"),
            ("get", "read", "reading them into memory"),
        ):
            ours, theirs = (
                statistics.median(turn.seconds[name] for turn in measured[1:])
                for name in (case, plain)
            )
            rows.append(
                store_row(
                    "disk",
                    case,
                    ours,
                    codec=codec,
                    nbytes=measured[-1].nbytes,
                    beside=(told, theirs),
                )
            )
    return rows


@dataclass(frozen=True, slots=True)
class _Measured:
    """Seconds by case, and the bytes of all files."""

    seconds: dict[str, float]
    nbytes: int


def _measure(keys: Sequence[str], kv: ChunkKV, codec: str) -> _Measured:
    with tempfile.TemporaryDirectory(prefix="kvlinker-bench-") as name:
        folder, copies = Path(name) / "chunks", Path(name) / "copies"
        copies.mkdir()
        tier = DiskTier(folder, 2 * len(keys) * kv.nbytes, Events(), codec=find_codec(codec))
        seconds = {"put": _seconds(lambda: [tier.put(key, kv) for key in keys])}
        files = chunk_files(folder)
        read_seconds(files)
        seconds["copy"] = copy_seconds(files, copies)
        seconds["get"] = _seconds(lambda: [tier.get(key) for key in keys])
        seconds["read"] = _seconds(lambda: [file.read_bytes() for file in files])
        return _Measured(seconds, total_bytes(files))


def _random_kv(subject: MeasuredModel, tokens: int) -> ChunkKV:
    def random(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(heads, tokens, dim).to(subject.loaded.dtype)

    return ChunkKV(
        tuple(
            LayerKV(random(layer.kv_heads, layer.key_dim), random(layer.kv_heads, layer.value_dim))
            for layer in keeping(subject.loaded.layers)
        ),
        None,
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
