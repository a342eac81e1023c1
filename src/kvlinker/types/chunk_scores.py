"""What attention showed about a chunk while its KV was computed: the basis of Cache-Craft's and H2O's selections."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ContextChunk:
    """A chunk that stood before another one when that one's KV was computed.

    ``attention``: inter(C_j, C_i), the attention of all the later chunk's tokens on this one (mean over heads and
    layers, sum over tokens).
    """

    content: str
    tokens: int
    attention: float


@dataclass(frozen=True, slots=True)
class Contextualization:
    """How much a chunk of ``tokens`` tokens looked at the chunks before it, and at itself (Cache-Craft, section 3.1).

    ``context``: the chunks before it, in order. ``intra``: the attention of its tokens on its earlier tokens (mean
    over heads and layers, sum over tokens).
    """

    tokens: int
    intra: float
    context: tuple[ContextChunk, ...] = ()

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError for what ``to_json`` did not write."""
        fields = json.loads(text)
        context = tuple(ContextChunk(**chunk) for chunk in fields["context"])
        return cls(fields["tokens"], fields["intra"], context)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkScores:
    """Attention scores of one chunk, means over heads and layers.

    ``inter`` [tokens]: each token's attention on all chunks before it. ``received`` [tokens]: the attention that each
    token gets from the chunk's tokens. Both are fp32.
    """

    contextualization: Contextualization
    inter: NDArray[np.float32]
    received: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.inter.nbytes + self.received.nbytes
