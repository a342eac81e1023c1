"""Measures how long steps take, while the engine computes them, and predicts it: for prompts,
decoding, and both."""

from __future__ import annotations

import math
import platform
import statistics
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.engines.contract.cost import CostModel
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.linking.plan import Range
from kvlinker.store.loading.arriving import ArrivingKV
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.speeds import Speeds


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


_WEIGHT = 0.1
"""The weight of a new measurement of ``_USUAL_TOKENS`` or more against all earlier ones; shorter
ones weigh less in proportion."""

_STIFFNESS = 0.01
"""The weight of keeping a and b, against fitting the measurements."""

_LEAST_SHARE = 0.01
"""The smallest a or b, as a share of the cost model's prediction for it alone: from zero it could
not grow."""

_USUAL_TOKENS = 512
_LEAST_TOKENS = 8
"""Prompts alone in a step teach nothing if they have fewer tokens than this: they mostly wait for
memory."""

_LEAST_CONSTANT = 0.1
"""The smallest constant, as a share of a step that only decodes."""

_RECENT_STEPS = 5
"""The last steps that only decode, whose median is c: one that was disturbed says nothing."""

_MIXED_WEIGHT = 0.2
"""The weight of a new measurement of prompts beside decoding against all earlier ones."""

_MOST_STRAIN = 2.0
"""The most by which prompts beside decoding may deviate from their prediction in one step; larger
deviations are disturbances."""

_READ_PAIRS = 4.0
"""The time of reading a token's KV, in pairs, until it is measured."""

Vector = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenCost:
    """The cost of computing a piece of a prompt: ``per_token``, ``per_pair`` of a token and one
    that it sees, and ``per_read`` token that stands before the piece, whose KV is read once however
    long the piece is."""

    per_token: float
    per_pair: float
    per_read: float = 0.0

    def of(self, ranges: Sequence[Range]) -> float:
        """Return the cost of these positions [begin, end)."""
        cost = self.per_read * _read(ranges)
        for begin, end in ranges:
            cost += self.per_token * (end - begin) + self.per_pair * _pairs(begin, end)
        return cost

    def of_first(self, tokens: int, ranges: Sequence[Range]) -> float:
        """Return the cost of the first ``tokens`` of these positions."""
        first = []
        for begin, end in ranges:
            if tokens <= 0:
                break
            first.append((begin, min(end, begin + tokens)))
            tokens -= end - begin
        return self.of(first)

    def affordable(self, ranges: Sequence[Range], budget: float) -> int:
        """Return how many of these positions, from the first on, cost at most ``budget``."""
        budget -= self.per_read * _read(ranges)
        count = 0
        for begin, end in ranges:
            cost = self.per_token * (end - begin) + self.per_pair * _pairs(begin, end)
            if cost > budget:
                return count + min(self._first(begin, budget), end - begin)
            budget -= cost
            count += end - begin
        return count

    def _first(self, begin: int, budget: float) -> int:
        """Solve per_token · n + per_pair · n(2 · begin + n + 1)/2 = budget for n, and round it
        down."""
        if budget <= 0:
            return 0
        linear = self.per_token + self.per_pair * (begin + 0.5)
        root = math.sqrt(linear**2 + 2 * self.per_pair * budget)
        return int(2 * budget / (linear + root) + 1e-9)


class ComputeThroughput:
    """Predicts the seconds of a step: c + a · tokens + b · pairs, a pair being a token and one that
    it sees.

    A prompt of L tokens has L(L + 1)/2 pairs, so that T_prefill(L) grows faster than L. The
    constant c is the time to read the weights. Each kind of step updates the terms that it shows
    best: prompts alone a and b, and decoding alone c. Steps with both show the cost of short pieces
    of prompts with decoding: a multiple of a and b, and the reading of KV.

    The engine's thread calls ``note``; any thread may call the other methods.
    """

    def __init__(
        self,
        cost: CostModel,
        speeds: Speeds | None = None,
        name: str = "model",
        *,
        on_host: bool = False,
    ) -> None:
        """``cost`` gives the ratio of a to b until it is measured. ``speeds`` remembers the
        measurements of the model ``name``. ``on_host`` is true if the engine computes on the
        processors that read chunks."""
        self.on_host = on_host
        self._shape = np.array([cost.per_token, cost.per_pair])
        self._speeds = speeds or Speeds()
        self._prefill = f"prefill {name}"
        self._decode = f"decode {name}"
        self._beside = f"beside {name}"
        self._lock = threading.Lock()
        self._squares: Vector = np.zeros((2, 2))
        self._sums: Vector = np.zeros(2)
        self._constants: deque[float] = deque(maxlen=_RECENT_STEPS)

    def note(self, batch: Batch, seconds: float) -> None:
        """Note that a step computed ``batch`` in ``seconds``. Steps with prompts whose policies
        dropped tokens, or that may have waited for KV, do not count."""
        if seconds <= 0:
            return
        decoded, prompts = _parts(batch)
        if not prompts:
            self._note_decoding(decoded, seconds)
        elif _telling(batch, prompts):
            amounts = sum(map(_amounts, prompts.values()), start=np.zeros(2))
            if decoded:
                self._note_mixed(decoded, amounts, sum(map(_read, prompts.values())), seconds)
            elif amounts[0] >= _LEAST_TOKENS:
                constant = min(self.weights_seconds or 0.0, (1 - _LEAST_CONSTANT) * seconds)
                self._follow(amounts, seconds - constant)

    def note_piece(self, batch: Batch, seconds: float) -> None:
        """Note that all layers of a piece of a prompt took ``seconds``, in steps with requests that
        decode. It reads the weights itself, as a step that only decodes does. (Without those of
        the head: tokens of pieces come out cheaper by its part in that.)"""
        ranges = [(run.start, run.end) for run in batch.runs]
        constant = self.weights_seconds
        if constant is not None and seconds > constant:
            self._note_beside(_amounts(ranges), _read(ranges), seconds - constant, constant)

    @property
    def weights_seconds(self) -> float | None:
        """The seconds of reading the weights once, c; None if it was not measured."""
        values = self._speeds.of(self._decode)
        return values[0] if values is not None and len(values) == 1 else None

    def seconds(self, ranges: Sequence[Range]) -> float | None:
        """Predict the seconds of computing these positions [begin, end) of a prompt in one step;
        None with nothing measured."""
        known = self._known()
        return (
            None
            if known is None
            else float((self.weights_seconds or 0.0) + known @ _amounts(ranges))
        )

    def prefill_seconds(self, tokens: int) -> float | None:
        """Predict T_prefill(``tokens``), in seconds; None if nothing was measured."""
        return self.seconds([(0, tokens)])

    def decode_seconds(self, positions: Sequence[Range]) -> float | None:
        """Predict the seconds of a step that computes the last tokens of requests that decode, at
        these positions, and nothing else; None if no such step was measured."""
        constant, known = self.weights_seconds, self._known()
        if constant is None:
            return None
        return float(constant + (0.0 if known is None else known @ _amounts(positions)))

    def cost_beside_decoding(self) -> TokenCost | None:
        """Return the seconds that prompts add to a step in which requests decode; None with nothing
        measured."""
        known = self._known()
        if known is None:
            return None
        multiple, per_read = self._piece_costs(known)
        return TokenCost(float(multiple * known[0]), float(multiple * known[1]), float(per_read))

    def urgency(
        self, computed: Sequence[Range], *, cached: int, decided: bool = False, alone: bool = False
    ) -> Urgency:
        """Return the computation that loading ``cached`` tokens' KV competes with, for a prompt
        whose positions ``computed`` are computed. ``decided`` is true if a policy has already
        chosen to load, ``alone`` if no other request is computed."""
        compute, prefill = self.seconds(computed), self.prefill_seconds(cached)
        if compute is None or prefill is None:
            return Urgency(shares_processors=self.on_host, alone=alone)
        return Urgency(compute, prefill, self.on_host, decided, alone)

    def _known(self) -> Vector | None:
        """Return a and b; None if they were not measured."""
        values = self._speeds.of(self._prefill)
        return np.array(values) if values is not None and len(values) == 2 else None

    def _piece_costs(self, known: Vector) -> Vector:
        """Return how many times as long tokens and pairs take in pieces beside decoding, and the
        seconds of reading a token's KV."""
        values = self._speeds.of(self._beside)
        return np.array(
            values if values is not None and len(values) == 2 else (1.0, _READ_PAIRS * known[1])
        )

    def _note_decoding(self, decoded: Sequence[Range], seconds: float) -> None:
        """Update c by a step that only decodes."""
        known, constant = self._known(), self.weights_seconds
        rest = 0.0 if known is None else float(known @ _amounts(decoded))
        if constant is not None and not self._constants:
            self._constants.append(constant)  # what another process measured
        self._constants.append(max(seconds - rest, _LEAST_CONSTANT * seconds))
        self._speeds.note(self._decode, [statistics.median(self._constants)])

    def _note_mixed(
        self, decoded: Sequence[Range], prompts: Vector, read: int, seconds: float
    ) -> None:
        """Update the cost of pieces of prompts by a step that also decodes; the less of them, the
        less it says."""
        alone = self.decode_seconds(decoded)
        if alone is not None:
            self._note_beside(prompts, read, seconds - alone, alone)

    def _note_beside(self, prompts: Vector, read: int, seconds: float, alone: float) -> None:
        """Update the cost of pieces of prompts by the ``seconds`` that some took; the shorter that
        is than a step that is ``alone``, the less it says."""
        known = self._known()
        if known is None:
            return
        costs = self._piece_costs(known)
        parts = costs * np.array([known @ prompts, read])
        expected = parts.sum()
        ratio = min(max(seconds / expected, 1 / _MOST_STRAIN), _MOST_STRAIN)
        weight = _MIXED_WEIGHT * min(1.0, expected / alone)
        changed = costs * ratio ** (
            weight * parts / expected
        )  # each as far as it has a part in the error
        self._speeds.note(self._beside, changed.tolist())

    def _follow(self, amounts: Vector, seconds: float) -> None:
        """Update a and b by least squares of relative errors over the last steps, older ones
        fading, and of the change of a and b, so that they stay if similar steps cannot distinguish
        them."""
        weight = _WEIGHT * min(1.0, amounts[0] / _USUAL_TOKENS)
        step = amounts / seconds
        with self._lock:
            known = self._known()
            by_arithmetic = self._shape / (self._shape @ step)
            known = (
                by_arithmetic if known is None else np.maximum(known, _LEAST_SHARE * by_arithmetic)
            )
            self._squares += weight * (np.outer(step, step) - self._squares)
            self._sums += weight * (step - self._sums)
            squares, sums = known[:, None] * self._squares * known, known * self._sums
            change = np.linalg.lstsq(
                squares + _STIFFNESS * np.eye(2), sums + _STIFFNESS, rcond=None
            )[0]
            self._speeds.note(self._prefill, (known * change.clip(0.5, 2)).tolist())


def throughput_name(loaded: LoadedModel) -> str:
    """Return the name under which a model's throughput is remembered; it contains everything that
    the throughput depends on."""
    cuda = loaded.device.type == "cuda"
    place = (
        torch.cuda.get_device_name(loaded.device)
        if cuda
        else f"{torch.get_num_threads()} threads of {processor()}"
    )
    return f"{loaded.fingerprint} {str(loaded.dtype).removeprefix('torch.')} {place}"


def _parts(batch: Batch) -> tuple[list[Range], dict[object, list[Range]]]:
    """Divide a step's positions into those that decode and those of prompts, by owner. An owner
    with one token whose logits are wanted decodes: it costs the same if it is a prompt's last
    one."""
    decoded: list[Range] = []
    prompts: dict[object, list[Range]] = {}
    for owner, runs in groupby(batch.runs, key=lambda run: run.owner):
        parts = list(runs)
        ranges = [(run.start, run.end) for run in parts]
        if parts[-1].wants_logits and len(parts) == 1 and parts[0].end - parts[0].start == 1:
            decoded += ranges
        else:
            prompts[owner] = ranges
    return decoded, prompts


def _telling(batch: Batch, prompts: Mapping[object, Sequence[Range]]) -> bool:
    """Return whether a step's duration says how long its ``prompts`` take."""
    narrowed = any(run.refinement is not None for run in batch.runs)
    streamed = any(
        isinstance(chunk.kv, ArrivingKV) for owner, chunk in batch.shared() if owner in prompts
    )
    return not narrowed and not streamed


def _read(ranges: Sequence[Range]) -> int:
    """Count the tokens before a piece of a prompt."""
    return ranges[0][0] if ranges else 0


def _amounts(ranges: Sequence[Range]) -> Vector:
    """Count the tokens and pairs of these positions."""
    tokens = sum(end - begin for begin, end in ranges)
    pairs = sum(_pairs(begin, end) for begin, end in ranges)
    return np.array([tokens, pairs], dtype=np.float64)


def _pairs(begin: int, end: int) -> float:
    """Count the pairs of these positions [begin, end)."""
    return (end - begin) * (begin + end + 1) / 2
