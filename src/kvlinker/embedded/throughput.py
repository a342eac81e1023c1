"""Measures how long the engine takes to compute prompts, while it does, and predicts it."""

from __future__ import annotations

import platform
import threading
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.embedded.batch import Batch
from kvlinker.embedded.model.loading import LoadedModel
from kvlinker.engine.cost import CostModel
from kvlinker.linking.plan import Range
from kvlinker.store.loading.arriving import ArrivingKV
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.loading.speeds import Speeds


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


_WEIGHT = 0.1
"""The weight of a new measurement of ``_USUAL_TOKENS`` or more against all earlier ones; shorter ones weigh less in
proportion."""

_STIFFNESS = 0.01
"""The weight of keeping a and b, against fitting the measurements."""

_LEAST_SHARE = 0.01
"""The smallest a or b, as a share of what the cost model predicts for it alone: from zero it could not grow."""

_USUAL_TOKENS = 512
_LEAST_TOKENS = 8
"""Steps whose runs are all shorter than this do not count: they mostly wait for memory, and say nothing about
prompts."""

Vector = NDArray[np.float64]


class ComputeThroughput:
    """Predicts the seconds that tokens take: a · tokens + b · pairs, a pair being a token and one that it sees.

    A prompt of L tokens has L(L + 1)/2 pairs, so that T_prefill(L) grows faster than L. a and b are fitted to the
    durations of steps.

    The engine's thread calls ``note``; any thread may call the other methods.
    """

    def __init__(
        self, cost: CostModel, speeds: Speeds | None = None, name: str = "prefill", *, on_host: bool = False
    ) -> None:
        """``cost`` gives the ratio of a to b until it is measured. ``speeds`` remembers a and b under ``name``.
        ``on_host`` is true if the engine computes on the processors that read chunks."""
        self.on_host = on_host
        self._shape = np.array([cost.per_token, cost.per_pair])
        self._speeds = speeds or Speeds()
        self._name = name
        self._lock = threading.Lock()
        self._squares: Vector = np.zeros((2, 2))
        self._sums: Vector = np.zeros(2)

    def note(self, batch: Batch, seconds: float) -> None:
        """Note that a step computed ``batch`` in ``seconds``. Steps whose policies dropped tokens, or that may have
        waited for KV, do not count."""
        narrowed = any(run.refinement is not None for run in batch.runs)
        streamed = any(isinstance(chunk.kv, ArrivingKV) for _, chunk in batch.shared())
        ranges = [(run.start, run.end) for run in batch.runs]
        if not narrowed and not streamed and max(end - begin for begin, end in ranges) >= _LEAST_TOKENS:
            self._follow(_amounts(ranges), seconds)

    def seconds(self, ranges: Sequence[Range]) -> float | None:
        """Predict the seconds of computing these positions [begin, end) of a prompt; None with nothing measured."""
        known = self._known()
        return None if known is None else float(known @ _amounts(ranges))

    def prefill_seconds(self, tokens: int) -> float | None:
        """Predict T_prefill(``tokens``), in seconds; None where nothing was measured."""
        return self.seconds([(0, tokens)])

    def urgency(self, computed: Sequence[Range], *, cached: int, decided: bool = False, alone: bool = False) -> Urgency:
        """Return what loading ``cached`` tokens' KV competes with, for a prompt whose positions ``computed`` are
        computed. ``decided`` is true if a policy has already chosen to load, ``alone`` if nobody else is computed."""
        compute, prefill = self.seconds(computed), self.prefill_seconds(cached)
        if compute is None or prefill is None:
            return Urgency(shares_processors=self.on_host, alone=alone)
        return Urgency(compute, prefill, self.on_host, decided, alone)

    def _known(self) -> Vector | None:
        """Return a and b; None if they were not measured."""
        values = self._speeds.of(self._name)
        return np.array(values) if values is not None and len(values) == 2 else None

    def _follow(self, amounts: Vector, seconds: float) -> None:
        """Update a and b by least squares of relative errors over the last steps, older ones fading, and of the change
        of a and b, so that they stay where similar steps cannot tell one from the other."""
        if seconds <= 0:
            return
        weight = _WEIGHT * min(1.0, amounts[0] / _USUAL_TOKENS)
        step = amounts / seconds
        with self._lock:
            known = self._known()
            by_arithmetic = self._shape / (self._shape @ step)
            known = by_arithmetic if known is None else np.maximum(known, _LEAST_SHARE * by_arithmetic)
            self._squares += weight * (np.outer(step, step) - self._squares)
            self._sums += weight * (step - self._sums)
            squares, sums = known[:, None] * self._squares * known, known * self._sums
            change = np.linalg.lstsq(squares + _STIFFNESS * np.eye(2), sums + _STIFFNESS, rcond=None)[0]
            self._speeds.note(self._name, (known * change.clip(0.5, 2)).tolist())


def throughput_name(loaded: LoadedModel) -> str:
    """Return the name under which a model's throughput is remembered; it contains everything that the throughput
    depends on."""
    cuda = loaded.device.type == "cuda"
    place = torch.cuda.get_device_name(loaded.device) if cuda else f"{torch.get_num_threads()} threads of {processor()}"
    return f"prefill {loaded.fingerprint} {str(loaded.dtype).removeprefix('torch.')} {place}"


def _amounts(ranges: Sequence[Range]) -> Vector:
    """Count the tokens and pairs of these positions."""
    tokens = sum(end - begin for begin, end in ranges)
    pairs = sum((end - begin) * (begin + end + 1) / 2 for begin, end in ranges)
    return np.array([tokens, pairs], dtype=np.float64)
