"""How far the KV of a prompt's tokens deviates from what is placed there: from vLLM's workers to a policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_ON_THE_WAY = "<f4"


@dataclass(frozen=True, slots=True)
class KVDeviation:
    """Squared L2 distances of new and placed ``key`` and ``value``, over all heads: [tokens] each; 0 where nothing is
    placed. It is what ``Refinement`` takes."""

    key: NDArray[np.float32]
    value: NDArray[np.float32]

    def deviation(self, part: int) -> NDArray[np.float32]:
        return (self.key, self.value)[part]

    def at(self, positions: NDArray[np.int64]) -> KVDeviation:
        """Of these tokens alone. Those that were not compared deviate infinitely."""
        missing = max(0, int(positions.max(initial=-1)) + 1 - len(self.key))
        key, value = (np.pad(part, (0, missing), constant_values=np.inf) for part in (self.key, self.value))
        return KVDeviation(key[positions], value[positions])

    def to_bytes(self) -> bytes:
        return np.stack([self.key, self.value]).astype(_ON_THE_WAY).tobytes()

    @classmethod
    def of_bytes(cls, data: bytes) -> KVDeviation:
        key, value = np.frombuffer(data, _ON_THE_WAY).reshape(2, -1).astype(np.float32)
        return cls(key, value)
