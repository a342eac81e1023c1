"""What the connector's scheduler side and its workers tell each other in every engine step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.vllm.protocol.slices import Slice
from kvlinker.vllm.protocol.transfer_plan import LinkOrder

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


@dataclass(frozen=True, slots=True)
class Begun:
    """A request whose order is to be fulfilled from now on, in the KV cache's blocks ``block_ids``.

    ``tokens`` [linked] are the prompt's. ``begin``: what stands before this position is there already. ``waits``: the
    request waits until the worker reports the end of it; otherwise it is part of this very step.
    """

    request_id: str
    order: LinkOrder
    tokens: NDArray[np.int64]
    block_ids: tuple[int, ...]
    begin: int
    waits: bool


@dataclass(frozen=True, slots=True)
class StepOrders:
    """To the workers, which all do exactly this, in this order: they compute together.

    ``idle``: nothing else happens in this step, so that workers may wait a little for what is being loaded.
    """

    begun: tuple[Begun, ...] = ()
    slices: tuple[Slice, ...] = ()
    dropped: tuple[str, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class StepReport:
    """From the workers. ``loaded``: for how many of them a request's chunks are at hand now. ``failed``: requests that
    are not linked after all. ``evicted`` and ``held``: chunks that left a worker's memory, and that are in it since,
    with its rank. ``deviations``: what requests that compare were for, as ``KVDeviation`` writes it."""

    loaded: Mapping[str, int] = field(default_factory=dict)
    failed: frozenset[str] = frozenset()
    held: frozenset[tuple[str, int]] = frozenset()
    evicted: frozenset[tuple[str, int]] = frozenset()
    deviations: Mapping[str, bytes] = field(default_factory=dict)

    def joined(self, other: StepReport) -> StepReport:
        names = {*self.loaded, *other.loaded}
        loaded = {name: self.loaded.get(name, 0) + other.loaded.get(name, 0) for name in names}
        deviations = {**self.deviations, **other.deviations}
        held, evicted = self.held | other.held, self.evicted | other.evicted
        return StepReport(loaded, self.failed | other.failed, held, evicted, deviations)
