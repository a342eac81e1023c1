"""Predicts times to the first token on GPUs from what they compute and move: a first measurement is
to be held against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvlinker.quality.bench.harness.benchmark import (
    Chunks,
    ChunkTokens,
    FreshTokens,
    Setup,
    benchmark,
)
from kvlinker.quality.bench.harness.report import Report, Row

VALUE_BYTES = 2
"""The bytes of a number in bf16."""

COMPUTED = 0.5
"""The share of a GPU's peak that matrix products reach."""

READ = 0.8
"""The share of its memory's bandwidth that reading weights and KV reaches."""

LAYERS_AT_ONCE = 4
"""The layers that are copied together."""

COLUMNS = (
    "model",
    "gpu",
    "policy",
    "computed_tokens",
    "tflop",
    "read_gb",
    "host_gb",
    "resident_ms",
    "host_ms",
    "resident_ratio",
    "host_ratio",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama's sizes."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    weight_bytes: float = VALUE_BYTES
    head_dim: int = 128
    vocabulary: int = 128_256

    @property
    def products(self) -> int:
        """The weights that each token is multiplied by, without the head's."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def kv_bytes(self) -> int:
        """The bytes of one token's keys and values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * VALUE_BYTES

    def operations(self, tokens: int, pairs: float) -> float:
        """The floating point operations of a pass that computes ``tokens``, one of them with
        logits, over ``pairs`` of query and key."""
        head = 2 * self.hidden * self.vocabulary
        return (
            2 * self.products * tokens + 4 * self.layers * self.heads * self.head_dim * pairs + head
        )

    def bytes_read(self, keys: int) -> float:
        """The least bytes that a pass reads: all weights, and the KV of ``keys`` tokens, once."""
        weights = self.products + self.hidden * self.vocabulary
        return self.weight_bytes * weights + self.kv_bytes * keys


@dataclass(frozen=True, slots=True)
class GPU:
    """One GPU, or several that share a model's heads: peaks in bf16 operations, and in bytes, per
    second."""

    operations: float
    memory: float
    link: float
    """From pinned memory, over PCIe."""


MODELS = {
    "8b": ModelShape(32, 4096, 32, 8, 14336),
    "8b, 4 bits": ModelShape(32, 4096, 32, 8, 14336, weight_bytes=0.5),
    "70b": ModelShape(80, 8192, 64, 8, 28672),
}
H100 = GPU(989e12, 3.35e12, 55e9)
GPUS = {
    "H100": H100,
    "4 H100": GPU(4 * H100.operations, 4 * H100.memory, 4 * H100.link),
    "laptop": GPU(100e12, 0.5e12, 12e9),
}
"""H100 SXM by its data sheet, dense, with 16 lanes of PCIe 5; a laptop's of 100 TFLOP/s and 500
GB/s, with 8 lanes of PCIe 4."""

CASES = (("8b", "H100"), ("8b, 4 bits", "laptop"), ("70b", "4 H100"))


@dataclass(frozen=True, slots=True)
class Pass:
    """The work of one forward pass: its tokens, and its pairs of query and key."""

    tokens: int
    pairs: float

    hides_copies: bool = False
    """True if each layer waits for its own chunks alone, while those of later ones are copied."""


def passes_of(chunks: int, chunk_tokens: int, fresh_tokens: int) -> dict[str, list[Pass]]:
    """Return what each policy computes in vLLM, whose own pass computes the fresh tokens.

    Tokens that are computed again come in a pass before it, may be anywhere but in the first chunk,
    which is exact, and see half of the chunks on average; fresh tokens are the last ones.
    """
    later = (chunks - 1) * chunk_tokens
    cached = chunks * chunk_tokens
    length = cached + fresh_tokens
    fresh = fresh_tokens * (length - fresh_tokens / 2)

    own = Pass(fresh_tokens, fresh)

    def repaired(again: int) -> list[Pass]:
        return [Pass(again, again * cached / 2, hides_copies=True), own] if again else [own]

    return {
        "full": [Pass(length, length**2 / 2)],
        "naive": [own],
        "legolink-16": repaired((chunks - 1) * min(16, chunk_tokens)),
        "query-5": [own, *repaired(later * 5 // 100)],
    }


def predict(
    model: ModelShape, gpu: GPU, chunks: int, chunk_tokens: int, fresh_tokens: int
) -> Iterator[Row]:
    """Yield a row for each policy. A pass takes as long as computing or reading, whichever is
    longer. Chunks are copied before the first pass. Where that pass hides copies, only the layers
    that are copied first come before it."""
    cached = chunks * chunk_tokens
    read = model.bytes_read(cached + fresh_tokens)
    full: float | None = None
    for policy, passes in passes_of(chunks, chunk_tokens, fresh_tokens).items():
        operations = [model.operations(each.tokens, each.pairs) for each in passes]
        reading = read / (READ * gpu.memory)
        seconds = [max(each / (COMPUTED * gpu.operations), reading) for each in operations]
        resident = sum(seconds)
        copied = 0 if policy == "full" else cached * model.kv_bytes
        copying = copied / gpu.link
        hidden = 0.0
        if passes[0].hides_copies:
            hidden = min(seconds[0], copying * (1 - LAYERS_AT_ONCE / model.layers))
        host = resident + copying - hidden
        full = full or resident
        yield {
            "policy": policy,
            "computed_tokens": sum(each.tokens for each in passes),
            "tflop": sum(operations) / 1e12,
            "read_gb": len(passes) * read / 1e9,
            "host_gb": copied / 1e9,
            "resident_ms": 1e3 * resident,
            "host_ms": 1e3 * host,
            "resident_ratio": full / resident,
            "host_ratio": full / host,
        }


@benchmark("roofline", runs_model=False)
def roofline(
    setup: Setup,
    *,
    chunks: Chunks = 32,
    chunk_tokens: ChunkTokens = 512,
    fresh_tokens: FreshTokens = 64,
) -> Report:
    """Predict times to the first token on GPUs, from data sheets: nothing is measured.

    Chunks are in the GPU's memory (resident), or are copied from pinned memory (host).
    """
    return Report(
        command=setup.command,
        machine={},
        versions={},
        settings={"chunks": chunks, "chunk_tokens": chunk_tokens, "fresh_tokens": fresh_tokens}
        | {"of_peak": COMPUTED, "of_bandwidth": READ},
        rows=[
            {"model": model, "gpu": gpu, **row}
            for model, gpu in CASES
            for row in predict(MODELS[model], GPUS[gpu], chunks, chunk_tokens, fresh_tokens)
        ],
        columns=COLUMNS,
    )
