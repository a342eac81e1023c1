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
from itertools import chain, groupby

import numpy as np
import torch
from numpy.typing import NDArray

from kvlinker.engines.contract.cost import CostModel
from kvlinker.engines.embedded.execution.batch import Batch
from kvlinker.engines.embedded.model.loaded import LoadedModel
from kvlinker.prompting.segments import Range
from kvlinker.store.loading.arriving import ArrivingKV
from kvlinker.store.loading.prompt_load import Urgency
from kvlinker.store.speeds import Speeds

_WEIGHT = 0.1
"""The weight of a new measurement of ``_USUAL_TOKENS`` or more against all earlier ones; shorter
ones weigh less in proportion. Chosen by hand, as are the weights and shares below."""

_STIFFNESS = 0.01
"""The weight of keeping a and b, against fitting the measurements."""

_LEAST_SHARE = 0.01
"""The smallest a or b, as a share of the cost model's prediction for it alone: from zero it could
not grow."""

_USUAL_TOKENS = 512
"""The tokens of a step of prompts alone whose measurement has the full weight."""

_LEAST_TOKENS = 8
"""The fewest tokens of a step of prompts alone that is measured: a shorter one mostly waits for
memory."""

_LEAST_CONSTANT = 0.1
"""The smallest constant, as a share of a step that only decodes."""

_RECENT_STEPS = 5
"""The number of the last steps that only decode, whose median is c: a disturbed one is left out."""

_MIXED_WEIGHT = 0.2
"""The weight of a new measurement of prompts beside decoding against all earlier ones."""

_STRAIN_LIMIT = 2.0
"""The largest factor by which prompts beside decoding may deviate from their prediction in one
step; larger deviations are disturbances."""

_READ_PAIRS = 4.0
"""The time of reading a token's KV, in pairs, until it is measured."""

Vector = NDArray[np.float64]

Amounts = tuple[float, float]
"""Numbers of tokens and of pairs."""


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
        if not ranges:
            return 0.0
        tokens, pairs = _amounts(ranges)
        return self.per_read * ranges[0][0] + self.per_token * tokens + self.per_pair * pairs

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
        budget -= self.per_read * (ranges[0][0] if ranges else 0)
        count = 0
        for begin, end in ranges:
            pairs = (end - begin) * (begin + end + 1) / 2
            cost = self.per_token * (end - begin) + self.per_pair * pairs
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
        self.weights_seconds: float | None = None
        """The seconds of reading the weights once, c; None if it was not measured."""

        self.cost_beside_decoding: TokenCost | None = None
        """The seconds that prompts add to a step in which requests decode; None with nothing
        measured."""

        self._known: tuple[float, float] | None = None  # a and b
        self._beside_costs = 1.0, 0.0  # the multiple of a and b, and the seconds of reading KV
        self._update()

    def _update(self) -> None:
        """Derive the terms of predictions from recent measurements of this or other processes.
        Other threads predict meanwhile, so that each term is replaced at once."""
        decode, known = self._speeds.of(self._decode), self._speeds.of(self._prefill)
        beside = self._speeds.of(self._beside)
        self.weights_seconds = decode[0] if decode is not None and len(decode) == 1 else None
        if known is None or len(known) != 2:
            self._known = self.cost_beside_decoding = None
            return
        a, b = self._known = known[0], known[1]
        if beside is None or len(beside) != 2:
            beside = 1.0, _READ_PAIRS * b
        multiple, per_read = self._beside_costs = beside[0], beside[1]
        self.cost_beside_decoding = TokenCost(multiple * a, multiple * b, per_read)

    def note(self, batch: Batch, seconds: float) -> None:
        """Note that a step computed ``batch`` in ``seconds``. Steps with prompts whose policies
        dropped tokens, or that may have waited for KV, do not count."""
        if seconds <= 0:
            return
        decoded, prompts = _parts(batch)
        if not prompts:
            self._note_decoding(decoded, seconds)
        elif _is_measurable(batch, prompts):
            amounts = _amounts(list(chain(*prompts.values())))
            if decoded:
                read = sum(ranges[0][0] for ranges in prompts.values())
                self._note_mixed(decoded, amounts, read, seconds)
            elif amounts[0] >= _LEAST_TOKENS:
                constant = min(self.weights_seconds or 0.0, (1 - _LEAST_CONSTANT) * seconds)
                self._note_prompts(np.array(amounts), seconds - constant)

    def note_piece(self, batch: Batch, seconds: float) -> None:
        """Note that all layers of a piece of a prompt took ``seconds``, in steps with requests that
        decode. It reads the weights itself, as a step that only decodes does. (Without those of
        the head: tokens of pieces come out cheaper by its part in that.)"""
        ranges = [(run.start, run.end) for run in batch.runs]
        constant = self.weights_seconds
        if constant is not None and seconds > constant:
            self._note_beside(_amounts(ranges), ranges[0][0], seconds - constant, constant)

    def seconds(self, ranges: Sequence[Range]) -> float | None:
        """Predict the seconds of computing these positions [begin, end) of a prompt in one step;
        None with nothing measured."""
        known = self._known
        if known is None:
            return None
        (a, b), (tokens, pairs) = known, _amounts(ranges)
        return (self.weights_seconds or 0.0) + a * tokens + b * pairs

    def prefill_seconds(self, tokens: int) -> float | None:
        """Predict T_prefill(``tokens``), in seconds; None if nothing was measured."""
        return self.seconds([(0, tokens)])

    def decode_seconds(self, positions: Sequence[Range]) -> float | None:
        """Predict the seconds of a step that computes the last tokens of requests that decode, at
        these positions, and nothing else; None if no such step was measured."""
        weights = self.weights_seconds
        return weights if weights is None else self.seconds(positions) or weights

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

    def _note(self, name: str, values: Sequence[float]) -> None:
        self._speeds.note(name, values)
        self._update()

    def _note_decoding(self, decoded: Sequence[Range], seconds: float) -> None:
        """Update c by a step that only decodes."""
        constant, rest = self.weights_seconds, 0.0
        if self._known is not None:
            (a, b), (tokens, pairs) = self._known, _amounts(decoded)
            rest = a * tokens + b * pairs
        if constant is not None and not self._constants:
            self._constants.append(constant)  # measured by another process
        self._constants.append(max(seconds - rest, _LEAST_CONSTANT * seconds))
        self._note(self._decode, [statistics.median(self._constants)])

    def _note_mixed(
        self, decoded: Sequence[Range], prompts: Amounts, read: int, seconds: float
    ) -> None:
        """Update the cost of pieces of prompts by a step that also decodes; the shorter the pieces,
        the smaller the weight."""
        alone = self.decode_seconds(decoded)
        if alone is not None:
            self._note_beside(prompts, read, seconds - alone, alone)

    def _note_beside(self, prompts: Amounts, read: int, seconds: float, alone: float) -> None:
        """Update the cost of pieces of prompts by the ``seconds`` that some took; the shorter that
        is than a step that is ``alone``, the smaller the weight."""
        if self._known is None:
            return
        (a, b), (tokens, pairs) = self._known, prompts
        costs = np.array(self._beside_costs)
        parts = costs * np.array([a * tokens + b * pairs, read])
        expected = parts.sum()
        ratio = min(max(seconds / expected, 1 / _STRAIN_LIMIT), _STRAIN_LIMIT)
        weight = _MIXED_WEIGHT * min(1.0, expected / alone)
        # each changes as far as it has a part in the error
        changed = costs * ratio ** (weight * parts / expected)
        self._note(self._beside, changed.tolist())

    def _note_prompts(self, amounts: Vector, seconds: float) -> None:
        """Update a and b by least squares of relative errors over the last steps, older ones
        fading, and of the change of a and b, so that they stay if similar steps cannot distinguish
        them."""
        weight = _WEIGHT * min(1.0, amounts[0] / _USUAL_TOKENS)
        step = amounts / seconds
        with self._lock:
            by_arithmetic = self._shape / (self._shape @ step)
            known = by_arithmetic
            if self._known is not None:
                known = np.maximum(self._known, _LEAST_SHARE * by_arithmetic)
            self._squares += weight * (np.outer(step, step) - self._squares)
            self._sums += weight * (step - self._sums)
            squares, sums = known[:, None] * self._squares * known, known * self._sums
            change = np.linalg.lstsq(
                squares + _STIFFNESS * np.eye(2), sums + _STIFFNESS, rcond=None
            )[0]
            self._note(self._prefill, (known * change.clip(0.5, 2)).tolist())


def processor() -> str:
    """Return the processor's name, as the system gives it."""
    try:
        with open("/proc/cpuinfo") as lines:
            return next(
                line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")
            )
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


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


def _is_measurable(batch: Batch, prompts: Mapping[object, Sequence[Range]]) -> bool:
    """Return whether a step's duration says how long its ``prompts`` take."""
    narrowed = any(run.refinement is not None for run in batch.runs)
    streamed = any(
        isinstance(chunk.kv, ArrivingKV) for owner, chunk in batch.shared if owner in prompts
    )
    return not narrowed and not streamed


def _amounts(ranges: Sequence[Range]) -> Amounts:
    """Count the tokens and pairs of these positions."""
    tokens, pairs = 0.0, 0.0
    for begin, end in ranges:
        tokens += end - begin
        pairs += (end - begin) * (begin + end + 1) / 2
    return tokens, pairs


def count_tokens(ranges: Sequence[Range]) -> int:
    """Count the tokens at these positions."""
    return sum([end - begin for begin, end in ranges])
