"""What a policy may look at besides the prompt: scores of chunks, the question's attention, deviations in a layer."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvlinker.chunk_scores import ChunkScores
from kvlinker.prompt.segments import Prompt


class Evidence(Protocol):
    """What is known before the first layer."""

    def scores(self, chunk: int) -> ChunkScores | None:
        """Scores from the creation of ``prompt.chunks[chunk]``'s KV, for policies with ``uses_scores``.

        None for KV that was stored without them.
        """
        ...

    def question_attention(self) -> NDArray[np.float32]:
        """The last token's attention on every token over the placed KV, mean over heads: [layers, length].

        For policies that probe.
        """
        ...


class LayerEvidence(Protocol):
    """What a layer's keys and values show about the tokens that the policy has kept so far, before its attention."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def layer(self) -> int: ...

    @property
    def layers(self) -> int:
        """The model's layers."""
        ...

    @property
    def positions(self) -> NDArray[np.int64]:
        """The tokens that are still computed, ascending: [active]."""
        ...

    @property
    def cached(self) -> NDArray[np.bool_]:
        """True for active tokens that a chunk cache holds, false for fresh ones: [active]."""
        ...

    @property
    def selected(self) -> int:
        """How many cached tokens the policy selected before the first layer."""
        ...

    def key_deviation(self) -> NDArray[np.float32]:
        """Squared L2 distance of new and placed key, over all heads: [active], 0 for fresh tokens."""
        ...

    def value_deviation(self) -> NDArray[np.float32]:
        """Squared L2 distance of new and placed value, over all heads: [active], 0 for fresh tokens."""
        ...

    def chunk_attention(self) -> NDArray[np.float32]:
        """The question's attention on every chunk in the layers before this one: [layers so far, chunks].

        Sum over the question's tokens (those behind the last chunk), mean over heads. For policies that watch; it ends
        with the first layer in which no policy asks for it.
        """
        ...
