"""What the connector's scheduler side and its workers tell each other in every engine step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvlinker.vllm.orders.order import LinkOrder
from kvlinker.vllm.orders.slices import Slice


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
