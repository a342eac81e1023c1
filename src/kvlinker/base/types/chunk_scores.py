"""Scores of a chunk's tokens from when its KV was computed; some policies select by them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

SCORE_BYTES_PER_TOKEN = 12
"""The most bytes that a chunk's scores take per token: three numbers in fp32."""


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """Describes a chunk that stood before another one when that one's KV was computed."""

    content: str
    """SHA-256 (hex) of its token ids."""

    tokens: int

    attention: float
    """inter(C_j, C_i): the attention of all the later chunk's tokens on this one, mean over heads
    and layers, sum over tokens."""


@dataclass(frozen=True, slots=True)
class Contextualization:
    """The attention of a chunk of ``tokens`` tokens to the chunks before it, and to itself
    (Cache-Craft, section 3.1)."""

    tokens: int

    intra: float
    """The attention of its tokens on its earlier tokens, mean over heads and layers, sum over
    tokens."""

    context: tuple[ContextChunk, ...] = ()
    """The chunks before it, in order."""

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the output of ``to_json``. Raises ValueError, KeyError or TypeError for anything
        else."""
        fields = json.loads(text)
        context = tuple(ContextChunk(**chunk) for chunk in fields["context"])
        return cls(fields["tokens"], fields["intra"], context)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScores:
    """Holds the scores of one chunk: of attention, means over heads and layers, and of
    sensitivity."""

    contextualization: Contextualization

    inter: NDArray[np.float32]
    """Each token's attention on all chunks before it: [tokens]."""

    received: NDArray[np.float32]
    """The attention that each token gets from the chunk's tokens: [tokens]."""

    sensitivity: NDArray[np.float32] | None = None
    """The distance by which each token's KV moves when another text stands before the chunk
    (``engine.sensitivity``): [tokens]; None if that was not measured."""

    @property
    def nbytes(self) -> int:
        """Bytes of the figures per token."""
        return (
            self.inter.nbytes
            + self.received.nbytes
            + (0 if self.sensitivity is None else self.sensitivity.nbytes)
        )
